"""Gzipped request bodies, which TF Serving takes too."""

from __future__ import annotations

import zlib

from serving.server.status import Code, Refused

__all__ = ["unzipped"]

_GZIP = 16 + zlib.MAX_WBITS


def unzipped(body: bytes, max_bytes: int) -> bytes:
    """The body; raises Refused where it is no gzip, or over the limit, without unpacking more than that."""
    unzip = zlib.decompressobj(_GZIP)
    try:
        plain = unzip.decompress(body, max_bytes + 1)
    except zlib.error as e:
        raise Refused(Code.INVALID_ARGUMENT, f"Failed to uncompress the gzipped body: {e}") from e
    if len(plain) > max_bytes:
        raise Refused(
            Code.RESOURCE_EXHAUSTED,
            f"Request body is larger than {max_bytes} bytes unzipped; send a smaller batch",
        )
    if not unzip.eof:
        raise Refused(Code.INVALID_ARGUMENT, "Failed to uncompress the gzipped body: it ends too early")
    return plain
