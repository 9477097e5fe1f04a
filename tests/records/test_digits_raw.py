import threading

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from trainers.models.digits_raw import FILES, write_raw


def test_the_digits_are_written_once(tmp_path):
    folder = tmp_path / "raw" / "digits"
    lines = []
    assert write_raw(folder, progress=lines.append) == {"source": str(folder), "files": FILES}
    digits = load_digits()
    paths = sorted(folder.glob("*/*.png"), key=lambda p: p.name)
    assert [path.name for path in paths] == [f"{i:04d}.png" for i in range(FILES)]
    assert [int(path.parent.name) for path in paths] == digits.target.tolist()
    with Image.open(paths[5]) as image:
        assert (image.mode, image.size) == ("L", (8, 8))
        assert (np.asarray(image) == np.rint(digits.images[5] * 255 / 16)).all()
    before = paths[0].stat().st_mtime_ns
    write_raw(folder, progress=lines.append)
    assert paths[0].stat().st_mtime_ns == before
    assert "already holds 1797 digits" in lines[-1]
    assert [path.name for path in folder.parent.iterdir()] == ["digits"]
    paths[0].unlink()
    write_raw(folder, progress=lines.append)
    assert len(list(folder.glob("*/*.png"))) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["digits"]


def test_two_writers_at_once(tmp_path):
    folder = tmp_path / "digits"
    threads = [threading.Thread(target=write_raw, args=(folder,), kwargs={"progress": id}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(folder.glob("*/*.png"))) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds files that aren't ours"):
        write_raw(tmp_path, progress=id)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
