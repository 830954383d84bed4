"""`python -m research pairs`: what `ablate` and `train` read of COCO's and ImageNet's training sets."""

import json

import pytest
from timm.data import ImageNetInfo

from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from research.options import PairsConfig
from research.pairs import write_pairs

NAMES = ImageNetInfo("imagenet-1k").label_names()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in (9, 3, 5)]
    captions = [{"image_id": number, "caption": f"{text} {number}."} for text in ("A", "The") for number in (3, 9, 5)]
    content = {"images": images, "annotations": captions}
    (tmp_path / "coco" / "annotations" / "captions_train2017.json").write_text(json.dumps(content))
    files = [f"coco/train2017/{image['file_name']}" for image in images]
    files += [f"imagenet/train/{NAMES[at]}/{file}" for at in (0, 250, 500) for file in ("b.JPEG", "a.JPEG", ".x")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


def test_the_first_of_coco_and_one_image_of_classes_evenly(root):
    file = write_pairs(PairsConfig(str(root), str(root / "pairs.jsonl"), coco=2, imagenet=2))
    captions, _ = open_data(file, root)
    of_classes = [(f"imagenet/train/{NAMES[0]}/a.JPEG", "a photo of a tench.")]
    of_classes += [(f"imagenet/train/{NAMES[500]}/a.JPEG", "a photo of a cliff dwelling.")]
    found = [(record.image, record.caption) for record in captions.records]
    assert found == [("coco/train2017/9.jpg", "A 9."), ("coco/train2017/3.jpg", "A 3."), *of_classes]
    with pytest.raises(UserError, match=f"train/{NAMES[333]}' holds no image"):
        write_pairs(PairsConfig(str(root), str(file), coco=0, imagenet=3))
