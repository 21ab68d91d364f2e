"""The 4-bit recipe of a QLoRA training run and its exact round trip.

What counts is what the weights were during training: quantized by bitsandbytes on CUDA and dequantized in every forward pass. The
codes come from the exact absmax of each block; only dequantization uses the 8-bit absmax of double quantization.
Sources: Dettmers et al., "QLoRA" (arXiv:2305.14314); bitsandbytes 0.50 (``functional.quantize_4bit``, the CUDA kernels'
decision trees), confirmed by results recorded on a CUDA device in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.cuda_reciprocal import cuda_reciprocal
from lora_merge.merging.errors import MergeError

QUANT_TYPES = ("nf4", "fp4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
QUANT_DTYPES = ("bfloat16", "float16", "float32")
DOUBLE_QUANT_BLOCK = 256
"""Block size of the second quantization; fixed in bitsandbytes."""

ASSUMED = "assumed (QLoRA default)"
GIVEN = "given explicitly"
WEIGHT_SETTINGS = ("quant_type", "double_quant", "block_size", "quant_dtype")
"""The settings of a recipe that change a dequantized weight; the others choose the weights."""
_SETTINGS = (*WEIGHT_SETTINGS, "skip_modules", "quantized_modules")


@dataclass(frozen=True)
class QuantRecipe:
    """How the base was quantized while the adapter was trained, and where each setting is known from.

    Attributes:
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: whether the absmax values were quantized to 8 bit in turn (``bnb_4bit_use_double_quant``).
        block_size: weights a block.
        quant_dtype: type of the weight when it was quantized, and so of what dequantization returns.
        skip_modules: ``llm_int8_skip_modules`` as given to transformers; None for its default rule.
        quantized_modules: names of the modules that were quantized, where a live model told them; None to follow the rule.
        origins: setting -> where it was found, for the settings above.
    """

    quant_type: str = "nf4"
    double_quant: bool = True
    block_size: int = 64
    quant_dtype: str = "bfloat16"
    skip_modules: tuple[str, ...] | None = None
    quantized_modules: tuple[str, ...] | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _expect(self.quant_type in QUANT_TYPES, "quant_type", self.quant_type, " or ".join(QUANT_TYPES))
        _expect(type(self.double_quant) is bool, "double_quant", self.double_quant, "true or false")
        _expect(
            type(self.block_size) is int and self.block_size in BLOCK_SIZES,
            "block_size",
            self.block_size,
            "one of " + ", ".join(map(str, BLOCK_SIZES)),
        )
        _expect(self.quant_dtype in QUANT_DTYPES, "quant_dtype", self.quant_dtype, "one of " + ", ".join(QUANT_DTYPES))
        for name in ("skip_modules", "quantized_modules"):
            value = getattr(self, name)
            names = value is None or (isinstance(value, tuple) and all(isinstance(module, str) for module in value))
            _expect(names, name, value, "a list of module names, or null")

    @property
    def assumed(self) -> bool:
        """Whether a setting that changes the dequantized weights is the usual QLoRA one rather than a recorded one."""
        return any(self.origins.get(name, ASSUMED) == ASSUMED for name in WEIGHT_SETTINGS)

    @property
    def source(self) -> str:
        """Where the settings were found, in one phrase."""
        return ", ".join(dict.fromkeys(self.origins.get(name, ASSUMED) for name in WEIGHT_SETTINGS))

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every setting, the origins and ``assumed``; :meth:`from_json` reads it back."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {**settings, "origins": dict(self.origins), "assumed": self.assumed}

    @classmethod
    def from_json(cls, value: Any, origin: str | None = None) -> QuantRecipe:
        """Read what :meth:`to_json` wrote. ``origin`` replaces the recorded origins of the settings that ``value`` names.

        Raises:
            MergeError: an unknown key or a value outside its range.
        """
        if not isinstance(value, dict):
            raise MergeError(f"quantization recipe: found a JSON {type(value).__name__}, expected an object")
        unknown = set(value) - set(_SETTINGS) - {"origins", "assumed"}
        if unknown:
            raise MergeError(f"quantization recipe: unknown setting {min(unknown)!r}; expected {', '.join(_SETTINGS)}")
        settings = {name: _hashable(value[name]) for name in _SETTINGS if name in value}
        origins = value.get("origins") or {}
        if not isinstance(origins, dict):
            raise MergeError("quantization recipe: origins must be an object")
        if origin is not None:
            origins = dict.fromkeys(settings, origin)
        return cls(**settings, origins=origins)

    def bnb_config(self) -> dict[str, Any]:
        """Keyword arguments of ``transformers.BitsAndBytesConfig`` that load the base as this recipe says.

        Raises:
            MergeError: the recipe has a block size that transformers cannot ask bitsandbytes for.
        """
        if self.block_size != 64:
            raise MergeError(
                f"a live reference needs block size 64, the only one transformers offers; the recipe says {self.block_size}"
            )
        config: dict[str, Any] = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.quant_type,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": self.quant_dtype,
        }
        if self.skip_modules is not None:
            config["llm_int8_skip_modules"] = list(self.skip_modules)
        return config

    def describe(self) -> str:
        """One line for people: ``NF4, double quantization, block 64, from bfloat16``."""
        double = "double quantization" if self.double_quant else "single quantization"
        return f"{self.quant_type.upper()}, {double}, block {self.block_size}, from {self.quant_dtype}"


def _expect(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise MergeError(f"quantization recipe: {name} is {found!r}, expected {expected}")


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


RECIPE_FIELDS = tuple(entry.name for entry in fields(QuantRecipe) if entry.name != "origins")


@dataclass(frozen=True)
class BlockScales:
    """What one pass over a tensor leaves for the second.

    Attributes:
        inverses: (blocks,) float32, the reciprocal of the exact largest magnitude of each block: codes are taken with it.
        scales: (blocks,) float32, what dequantization multiplies with: the same, or its 8-bit round trip.
    """

    inverses: NDArray[np.float32]
    scales: NDArray[np.float32]


def block_scales(absmax: NDArray[np.float32], recipe: QuantRecipe) -> BlockScales:
    """Complete the absmax (blocks,) of a whole tensor to its :class:`BlockScales`.

    Double quantization subtracts the mean over the *whole* tensor, so ``absmax`` must be that of exactly the tensor which one
    Linear4bit held. The mean is taken in float64 and rounded once; CUDA sums in float32 in an order of its own, so that its
    mean can differ in the last bit.
    """
    if not recipe.double_quant:
        return BlockScales(cuda_reciprocal(absmax), absmax)
    offset = np.float32(absmax.mean(dtype=np.float64))
    nested_absmax = np.empty(-(-absmax.size // DOUBLE_QUANT_BLOCK), np.float32)
    codes = quantize_absmax(absmax - offset, nested_absmax)
    return BlockScales(cuda_reciprocal(absmax), dequantize_absmax(codes, nested_absmax, offset))


def quantize_absmax(shifted: NDArray[np.float32], nested_absmax: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The 8-bit codes (blocks,) of an absmax less its mean; ``nested_absmax`` (nested blocks,) is an output."""
    codes: NDArray[np.uint8] = kernels.quantize_dynamic_8bit(
        shifted, DOUBLE_QUANT_BLOCK, dynamic_map(), *_dynamic_cells(), nested_absmax
    )
    return codes


@cache
def _dynamic_cells() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint32]]:
    near, far, bounds = np.empty(65536, np.uint8), np.empty(65536, np.uint8), np.empty(65536, np.uint32)
    kernels.dynamic_cells(dynamic_map(), near, far, bounds)
    return near, far, bounds


def dequantize_absmax(
    codes: NDArray[np.uint8],
    nested_absmax: NDArray[np.float32],
    offset: np.float32,
    block_size: int = DOUBLE_QUANT_BLOCK,
    code: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The float32 absmax (blocks,) that 8-bit ``codes`` (blocks,) stand for; two roundings, as in bitsandbytes."""
    table = dynamic_map() if code is None else code
    return table[codes] * np.repeat(nested_absmax, block_size)[: codes.size] + offset


def round_trip(values: NDArray[np.float32], scales: BlockScales, blocks: slice, recipe: QuantRecipe) -> None:
    """Replace ``values`` (n,), which must start at the first element of ``blocks``, by their quantized-and-dequantized float32.

    The result still has to be rounded to ``recipe.quant_dtype``.
    """
    kernel = kernels.round_trip_nf4 if recipe.quant_type == "nf4" else kernels.round_trip_fp4
    levels, bounds = level_tables(recipe.quant_type)
    kernel(values, recipe.block_size, scales.inverses[blocks], scales.scales[blocks], levels, bounds)


@cache
def dynamic_map() -> NDArray[np.float32]:
    """The 256 levels of the 8-bit dynamic type, ascending, float32.

    Seven decades hold 1, 2, 4 ... 64 levels of either sign, each in the middle of an even division of 0.1 to 1; 0 and 1 complete
    them. Equal to ``bitsandbytes.functional.create_dynamic_map()`` to the bit, which takes the divisions from
    ``torch.linspace``: from the nearer end, with a single rounding. Written out so that a merge need not load torch. Source:
    arXiv:1511.04561.
    """
    levels = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        count = 1 << decade
        step = np.float64(np.float32(np.float32(1) - np.float32(0.1)) / np.float32(count))
        upward = np.float64(np.float32(0.1)) + step * np.arange(count + 1)
        downward = 1 - step * np.arange(count, -1, -1)
        bounds = np.where(np.arange(count + 1) < (count + 1) // 2, upward, downward).astype(np.float32)
        middles = np.float32(10.0 ** (decade - 6)) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        levels += [middles, -middles]
    return np.sort(np.concatenate(levels))


# The quantiles of a normal distribution that QLoRA's appendix lists, and the values of FP4's magnitudes by code.
_NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


@cache
def code_table(quant_type: str) -> NDArray[np.float32]:
    """The 16 values of the 4-bit type by code, float32; ``bitsandbytes.functional.get_4bit_type`` has the same."""
    if quant_type == "nf4":
        return np.array(_NF4_LEVELS, np.float32)
    magnitudes = np.array(_FP4_MAGNITUDES, np.float32) / np.float32(12)
    return np.concatenate([magnitudes, -magnitudes])


# Thresholds of the CUDA kernels' decision trees, by ascending level. They are constants there, a few of them an ulp off the
# midpoints that float32 arithmetic gives.
_NF4_BOUNDS = (
    -0.8480964004993439,
    -0.6106329262256622,
    -0.4599952697753906,
    -0.33967943489551544,
    -0.23460740596055984,
    -0.13791173323988914,
    -0.045525018125772476,
    0.03979014977812767,
    0.1202552504837513,
    0.2035212516784668,
    0.2920137718319893,
    0.3893125355243683,
    0.5016634166240692,
    0.6427869200706482,
    0.8614784181118011,
)
_FP4_MAGNITUDE_BOUNDS = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)


@cache
def level_tables(quant_type: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What the kernels work with: levels, ascending, and the thresholds between them; FP4's are those of the magnitude."""
    if quant_type == "nf4":
        return code_table("nf4"), np.array(_NF4_BOUNDS, np.float32)
    return np.sort(code_table("fp4")[:8]), np.array(_FP4_MAGNITUDE_BOUNDS, np.float32)
