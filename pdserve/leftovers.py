"""What a killed supervisor leaves behind, noted while it lives, so that others can end it."""

import os
import shutil
import tempfile
from pathlib import Path

from pdserve.processes import descendants, kill_naming, kill_noted, write_note

_FOLDER_PREFIX = "pdserve-"


def make_ray_folder(state_folder: Path) -> Path:
    """Make and note a folder for Ray's files.

    NOTE: not below the state folder: the paths of Ray's sockets have to stay below 108 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp"))
    (state_folder / "ray_folder").write_text(str(folder))
    return folder


def note_processes(state_folder: Path) -> None:
    """Note what runs below us now, for whoever ends it if we are killed.

    NOTE: workers see the death of Ray only by becoming children of process 1, which a subreaper
    (a container's init, a user session) prevents.

    Raises: OSError: the note cannot be written.
    """
    write_note(state_folder / "ray_processes", descendants(os.getpid()))


def remove_leftovers(state_folder: Path) -> None:
    """End the processes and remove the folder that were noted; their supervisor must be gone.

    NOTE: Ray's agents outlive a raylet that is killed. Workers that it had just started are not
    noted yet; until they rename themselves, their command lines name the folder.
    """
    kill_noted(state_folder / "ray_processes")
    note = state_folder / "ray_folder"
    if note.is_file():
        folder = Path(note.read_text())
        if folder.name.startswith(_FOLDER_PREFIX):
            kill_naming(folder)
            shutil.rmtree(folder, ignore_errors=True)
        note.unlink()
