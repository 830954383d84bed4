"""What a multimodal model is asked about an image."""

from debias_diffusion.data.batch import draw_generator

# Fix-CLIP, section 6, verbatim.
LONG = (
    "Provide a comprehensive description of this image, including all visual elements, their spatial relationships, "
    "and the overall atmosphere.",
    "Generate a detailed caption explaining what’s happening in this image, covering actions, subjects, environment, "
    "and temporal context.",
    "Analyze this image in detail, describing the main subjects, background, lighting, colors, and composition.",
    "Write an extensive caption that captures both the explicit visual content and implicit context or story behind "
    "this image.",
    "Describe this image as if explaining it to someone who cannot see it, including all relevant details and visual "
    "nuances.",
    "Break down the scene components in this image, detailing the foreground, middle ground, and background elements.",
    "Describe the environmental context, lighting conditions, time of day, and weather elements visible in this image.",
    "Analyze the spatial arrangement and relationships between all objects and subjects in this image.",
    "Detail the setting of this scene, including architectural elements, natural features, and atmospheric conditions.",
    "Explain the visual dynamics of this scene, including movement, direction, and flow of elements.",
    "Elaborate on the image’s details such as the objects’ textures, the direction of shadows, and how they "
    "contribute to the overall look.",
    "Describe the image from top to bottom and left to right, highlighting every element and its significance within "
    "the frame.",
    "Generate a caption that delves into the emotional undertones suggested by the image’s colors, expressions of the "
    "subjects, and the setting.",
    "Analyze the image to explain how the placement of elements affects the flow and balance within the visual space.",
    "Write a detailed description of the image that includes the sizes of the objects relative to each other and "
    "their proximity.",
    "Describe the image in terms of the contrast between light and dark areas and how it shapes the perception of the "
    "scene.",
    "Generate a caption that interprets the possible narrative connections between different elements in the image.",
    "Analyze the image to explain how the colors interact with each other and what mood they create together.",
    "Write a detailed description of the image that covers the small details often overlooked, like tiny patterns on "
    "objects.",
    "Describe the image by focusing on the perspective used and how it makes the viewer experience the scene.",
)
# Ours: the paper's short captions are Shikra's, and it does not say what that was asked.
SHORT = ("Describe this image in one sentence.",)
INSTRUCTIONS = {"long": LONG, "short": SHORT}


def draw_instruction(kind: str, seed: int, sample_id: str) -> str:
    """The prompt of one image, drawn uniformly (section 6). A pure function of its arguments.

    Args:
        kind: "long" or "short".
    """
    return draw_generator(seed, 0, sample_id).choice(INSTRUCTIONS[kind])
