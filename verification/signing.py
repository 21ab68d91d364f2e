"""DSSE envelopes around certificates: Ed25519 keys in PEM files, through securesystemslib.

Keys come from any tool that speaks PEM: ``openssl genpkey -algorithm ed25519 -out gate.key`` and
``openssl pkey -in gate.key -pubout -out gate.pub``. Source: https://github.com/secure-systems-lab/dsse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.errors import no_file
from verification.errors import VerificationError
from verification.strict_json import expect_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def sign(payload: bytes, private_key: str | os.PathLike[str]) -> dict[str, Any]:
    """The DSSE envelope of ``payload``, signed with the unencrypted Ed25519 key in the PEM file ``private_key``.

    Raises:
        VerificationError: the key cannot be read or is of another kind.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    try:
        key = load_pem_private_key(_read_key(private_key, "signing key", "an Ed25519 private key in PEM"), None)
    except (ValueError, TypeError) as error:
        raise VerificationError(f"signing key {private_key}: is no unencrypted PEM private key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise VerificationError(f"signing key {private_key}: is a {type(key).__name__}, expected an Ed25519 key")
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(key))
    return dict(envelope.to_dict())


def check_signing_key(private_key: str | os.PathLike[str]) -> None:
    """Sign nothing of importance, so that a bad key is found before hours of measuring; raises as :func:`sign` does."""
    sign(b"{}", private_key)


def check_trusted_key(public_key: str | os.PathLike[str]) -> None:
    """Find a bad key before anything else is read.

    Raises:
        VerificationError: the file cannot be read or holds no Ed25519 public key in PEM.
    """
    _public_key(public_key)


def is_envelope(value: Any) -> bool:
    """Whether a parsed certificate is a DSSE envelope rather than a bare statement."""
    return isinstance(value, Mapping) and "payloadType" in value


def open_envelope(value: Mapping[str, Any], trusted_key: str | os.PathLike[str] | None) -> bytes:
    """The payload of a DSSE envelope; with ``trusted_key`` only when the Ed25519 key in that PEM file signed it.

    Raises:
        VerificationError: the envelope is malformed, or no signature in it is by the trusted key.
    """
    from securesystemslib.dsse import Envelope

    expect_keys(value, {"payload", "payloadType", "signatures"}, "certificate envelope")
    if value["payloadType"] != PAYLOAD_TYPE:
        raise VerificationError(f"certificate envelope: payload type is {value['payloadType']!r}, expected {PAYLOAD_TYPE!r}")
    try:
        copied = {**value, "signatures": [dict(signature) for signature in value["signatures"]]}
        envelope = Envelope.from_dict(copied)
    except Exception as error:  # whatever a malformed envelope makes the library raise, it is malformed
        raise VerificationError(f"certificate envelope: is malformed: {error}") from error
    if trusted_key is not None:
        _check_signature(envelope, trusted_key)
    payload: bytes = envelope.payload
    return payload


def _check_signature(envelope: Any, trusted_key: str | os.PathLike[str]) -> None:
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import SSlibKey

    public, message = _public_key(trusted_key), envelope.pae()
    for signature in envelope.signatures.values():
        # The key id of a signature is a hint that nothing protects; what counts is whether the trusted key verifies it.
        try:
            SSlibKey.from_crypto(public, signature.keyid).verify_signature(signature, message)
        except UnverifiedSignatureError:
            continue
        return
    raise VerificationError(f"certificate: none of its {len(envelope.signatures)} signatures is by the trusted key {trusted_key}")


def _public_key(path: str | os.PathLike[str]) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(_read_key(path, "trusted key", "an Ed25519 public key in PEM"))
    except (ValueError, TypeError) as error:
        raise VerificationError(f"trusted key {path}: is no PEM public key: {error}") from error
    if not isinstance(public, Ed25519PublicKey):
        raise VerificationError(f"trusted key {path}: is a {type(public).__name__}, expected an Ed25519 key")
    return public


def _read_key(path: str | os.PathLike[str], what: str, expected: str) -> bytes:
    if reason := no_file(path, expected):
        raise VerificationError(f"{what} {reason}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise VerificationError(f"{what} {path}: cannot be read: {error.strerror or error}") from error
