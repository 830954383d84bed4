"""A folder of image and caption files, opened as any other image-caption pairs."""

from pathlib import Path

from PIL import Image

from debias_diffusion.data.images import is_there
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import open_data, read_captions


def put(folder: Path, *names: str, caption="A cat. A dog."):
    """Images, and captions for names that end in txt, each image of another colour."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".txt":
            path.write_text(caption, encoding="utf-8")
        else:
            Image.new("RGB", (8, 8), (sum(map(ord, name)) % 256, 0, 0)).save(path)


def test_pairs_are_read_from_all_folders_in_the_order_of_their_names(tmp_path):
    names = ["10.png", "2.jpg", "b/1.webp", "a/c/x.y.JPEG", "a-b/1.PNG", "ä/猫.jpg"]
    for name in names:
        put(tmp_path, name)
        ending = ".TXT" if name.startswith("10") else ".txt"
        put(tmp_path, name.rpartition(".")[0] + ending, caption=f"\ufeffAbout {name}.\r\n\n Größe. ")
    captions, source = open_data(str(tmp_path))
    assert captions.bad == []
    assert list(captions.records) == [Record(name, name, f"About {name}. Größe.") for name in sorted(names)]
    for name in names:
        with Image.open(tmp_path / name) as file:
            assert source.open(name).tobytes() == file.convert("RGB").tobytes()
        assert is_there(source, name) and len(source.stamp(name)) == 16
    assert list(read_captions(tmp_path).records) == list(captions.records)


def test_hidden_files_and_others_are_passed_over(tmp_path):
    put(tmp_path, "1.jpg", "1.txt", "._1.jpg", ".hidden/2.jpg", ".cache/3.txt")
    for name in ("1.npz", "README", "1.txt.bak", "x.jpg~", ".x.tar"):
        (tmp_path / name).write_text("?")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "itself").symlink_to(tmp_path)
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    captions, _ = open_data(tmp_path)
    assert [record.image for record in captions.records] == ["1.jpg"] and captions.bad == []


def test_what_has_no_partner_or_cannot_be_read_is_left_out_and_named(tmp_path):
    put(tmp_path, "1.jpg", "1.txt", "a/2.png", "a/2.txt", "b/3.jpg", "d/3.jpg", "d/3.jpeg", "d/3.txt")
    put(tmp_path, "x.jpg", "X.txt", "4.png", "5.png", "6.png")
    (tmp_path / "b" / "metadata.csv").write_text("file_name,text\n3.jpg,A cat.\n")
    (tmp_path / "4.txt").write_text(" \n")
    (tmp_path / "5.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "6.txt").write_text("A" * (1 << 20) + ".")
    captions, _ = open_data(tmp_path)
    assert [record.image for record in captions.records] == ["1.jpg", "a/2.png"]
    assert {bad.where: bad.kind for bad in captions.bad} == {
        "4.png": "empty or non-text caption",
        "5.png": "bad caption file",
        "6.png": "absurdly large caption",
        "X.txt": "no image",
        "b/3.jpg": "no caption",
        "b/metadata.csv": "metadata not read",
        "d/3.jpeg": "same name",
        "x.jpg": "no caption",
    }
