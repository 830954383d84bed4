"""Research's evaluations."""

from debias_diffusion.eval.registry import Evaluation
from debias_diffusion.registry import Command

from ..options import JudgeConfig, MaskedRetrievalConfig
from .options import ClassificationConfig, ColaConfig, ExamplesConfig, GrowthConfig, MapsConfig


def _takes_no_part(*_) -> None:
    """In `evaluate all`."""


EVALUATIONS = {
    "growth": Evaluation(
        title="Does a longer caption fit better?",
        options=GrowthConfig,
        function="evaluations.growth:evaluate_growth",
        needs="two towers",
    ),
    "retrieval-examples": Evaluation(
        title="Captions that encoders disagree on",
        options=ExamplesConfig,
        function="evaluations.retrieval_examples:evaluate_examples",
        needs="two towers",
        settings=_takes_no_part,
    ),
    "image-maps": Evaluation(
        title="Where an image fits a text",
        options=MapsConfig,
        function="evaluations.image_maps:evaluate_maps",
        needs="two towers",
        example="--encoders toy/clip --image photo.jpg --text 'A red star.' --output maps",
        settings=_takes_no_part,
        saved=("image-maps.png",),
    ),
    "classification": Evaluation(
        title="Zero-shot classification",
        options=ClassificationConfig,
        function="evaluations.classification:evaluate_classification",
        needs="two towers",
        example="--encoders ViT-B-16-quickgelu:openai --dataset cifar-10 --data cifar-10-batches-bin --output scores",
        settings=_takes_no_part,
    ),
    "cola": Evaluation(
        title="Do objects keep their attributes?",
        options=ColaConfig,
        function="evaluations.cola:evaluate_cola",
        needs="two towers",
        example="--encoders ViT-B-16-quickgelu:openai --data COLA_multiobjects_matching_benchmark.json --images images "
        "--output scores",
        settings=_takes_no_part,
    ),
    "judge": Command(
        JudgeConfig, "judge_labels:evaluate_judge", "--labels labels --judge toy/checker --output scores", "eval"
    ),
    "masked-retrieval": Command(
        MaskedRetrievalConfig,
        "smart_clip.retrieval:evaluate_masked_retrieval",
        "--encoders runs/smart-clip --data toy/test --output scores",
        "eval",
    ),
}
