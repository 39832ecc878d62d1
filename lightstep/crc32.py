"""CRC-32 by isal if it is installed, or else by zlib.

Both give the same result and release the GIL.
"""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
