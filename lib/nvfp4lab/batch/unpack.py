"""Takes a piece that another host sent as a zip: only plain files, only inside its own folder, only up to a size."""

import stat
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.errors import LabError

MAX_PIECE_BYTES = 2 * 2**30


def unpack_piece(archive: zipfile.ZipFile, piece: Piece, run_dir: Path) -> Result:
    """Publish `archive` as the result of `piece`; an earlier result stays. Raises LabError for a hostile archive."""
    pieces = run_dir / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    if pieces_module.published(piece, run_dir) is None:
        attempt = Path(tempfile.mkdtemp(prefix=f"{piece.digest}.attempt-", dir=pieces))
        extract(archive, attempt, MAX_PIECE_BYTES)
        attempt.rename(piece.folder(run_dir))
    result = pieces_module.published(piece, run_dir)
    if result is None:
        raise LabError(f"{piece.name}: what its host sent back holds no result")
    return result


def extract(archive: zipfile.ZipFile, folder: Path, max_bytes: int) -> None:
    """Extract `archive` into `folder`. Raises LabError on links, absolute or `..` paths, or more than `max_bytes`."""
    total = 0
    for member in archive.infolist():
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts or stat.S_ISLNK(member.external_attr >> 16):
            raise LabError(f"archive member {member.filename!r} would leave its folder; nothing more was unpacked")
        total += member.file_size
        if total > max_bytes:
            raise LabError(f"archive unpacks to more than {max_bytes} bytes; refused")
        archive.extract(member, folder)
