"""Checks the certificate, then decides and writes: the two-phase batch job."""
