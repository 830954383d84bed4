"""Options of `python -m research synthesize`. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.errors import UserError
from debias_diffusion.limits import NonNegativeInt, PositiveInt, Seed
from debias_diffusion.options import AllowsBad


@dataclass
class SynthesizeConfig(AllowsBad):
    """Write captions for images with a multimodal model, clean them, and leave pairs that `train` reads.

    Give --data, --images, or both: --images alone for a folder of images without captions.

    Attributes:
        model: Multimodal model, by its name on the server. Fix-CLIP's is llava-hf/llama3-llava-next-8b-hf.
        server: Address of an OpenAI-compatible server that has the model, such as http://localhost:8000 of vLLM.
        output: Folder to write: captions.jsonl (for shards: shards), removed.jsonl, report.html. A stopped run
            continues there with the same settings.
        data: Pairs whose images are captioned: any data that `train` reads but toy scenes. Their captions become short
            captions.
        images: Folder that image paths in the data file start from; without --data, the folder of the images.
        kind: long asks for a detailed description, with one of Fix-CLIP's 20 prompts. short asks for one sentence: the
            short caption beside the data's caption, or the caption where there is none.
        batch: Images that are asked about at once.
        max_new_tokens: Where an answer is cut. An unfinished last sentence is dropped.
        seed: Of the choice of prompts.
        per_part: Images in a part. A stopped run repeats at most one part.
        workers: Processes that read images; 0 reads them in the one that asks. auto fits the cores.
    """

    model: str
    server: str
    output: str
    data: str | None = None
    images: str | None = None
    kind: Literal["long", "short"] = "long"
    batch: PositiveInt = 8
    max_new_tokens: PositiveInt = 300
    seed: Seed = 0
    per_part: PositiveInt = 1000
    workers: NonNegativeInt | Literal["auto"] = "auto"

    def __post_init__(self):
        super().__post_init__()
        if self.data is None and self.images is None:
            raise UserError("Neither data nor images is given. Give --images, a folder of images, or --data, pairs.")
        from debias_diffusion.data.sources import is_toy_scenes  # takes seconds, which help need not wait for

        if self.data is not None and is_toy_scenes(self.data):
            raise UserError(
                f"The scenes of {self.data!r} are no files and have long captions. Give a folder of images, or pairs."
            )
