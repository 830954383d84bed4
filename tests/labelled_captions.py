"""Captions with the fault that they have, or None: half are good ones that look bad.

`SEEN` were written before `fault`, and it was built to judge them; `HELD_BACK` were written afterwards, and `fault` has
not been changed since. All were written for these tests: no model wrote them.
"""

SEEN = (
    # Good ones that look bad.
    (
        None,  # the same opening in every sentence
        "The image shows four shelves of a kitchen cupboard. On the top shelf there are three white plates. On the second "
        "shelf there are six glass cups. On the third shelf there is a stack of blue bowls. On the bottom shelf there is "
        "a large iron pot with a lid.",
    ),
    (
        None,  # a word three times running
        "A very, very, very long queue of people winds around the block in front of a cinema at night. Neon letters glow "
        "above the entrance, and most of the people wear dark winter coats and hold umbrellas against the rain.",
    ),
    (
        None,  # words of a refusal, on a sign
        "A handwritten cardboard sign hangs in the window of a small bakery and reads \"I'm sorry, but I can't open today\". "
        "Behind the glass, empty wooden shelves and a brass scale stand in soft morning light.",
    ),
    (
        None,  # numbers
        "A scoreboard above an ice rink shows 3 : 2 in red digits, with 12:45 left on the clock below. Players in white "
        "numbers 7, 11, 19, 23 and 88 skate towards the goal, while the crowd behind the boards raises blue scarves.",
    ),
    (
        None,  # markup inside a quotation
        'A computer screen on a cluttered desk shows lines of code, among them "<div>" and "**kwargs", in green letters '
        "on black. A white mug with a tea bag stands to the left of the keyboard, and a lamp throws warm light on it.",
    ),
    (
        None,  # an unfinished last sentence, which is dropped
        "A brown horse grazes in a meadow behind a wooden fence. Tall grass with yellow flowers covers the ground, and a "
        "row of poplars stands at the far end of the meadow under a cloudy sky. In the distance, a small red",
    ),
    (
        None,  # a phrase twice running
        "Waves roll in, again and again, on a beach of grey pebbles. Again and again they leave a line of white foam that "
        "shines in the low sun. A wooden boat with peeling blue paint lies on its side above the line of the water.",
    ),
    (
        None,  # a list of parallel phrases
        "A market stall offers red apples, green apples, yellow apples, red pears, green pears, yellow pears, red plums "
        "and yellow plums in wooden boxes. A woman with a straw hat weighs fruit on an old scale behind the boxes.",
    ),
    (
        None,  # hedging is no refusal
        "An elderly man sits on a park bench and feeds pigeons from a paper bag. He wears a tweed cap and a long grey "
        "coat. It is not possible to see his face, because the brim of the cap throws a shadow over it.",
    ),
    (
        None,  # symbols of a game
        "A tic-tac-toe board is drawn with chalk on grey asphalt. Its rows read X O X, O X O and O X X from top to "
        "bottom. Small shoes of a child are visible at the upper edge, and a piece of pink chalk lies beside the board.",
    ),
    (
        None,  # a sentence twice
        "A poster on a brick wall announces a concert in large yellow letters. The letters are torn. Below it hangs a "
        "second poster of the same size for a circus, with an elephant and a clown. The letters are torn.",
    ),
    (
        None,  # abbreviations and a quotation at the end
        "A street sign at the corner of St. James Ave. and 5th St. is covered with snow. A person in a red parka, about 6 "
        'ft. tall, scrapes ice from the windscreen of a parked car whose bumper sticker reads "Honk if you love snow!"',
    ),
    (
        None,  # first person, in a comic
        'A four-panel comic shows a cat at a desk. In the first panel the cat says: "I cannot do this any more." In the '
        "second it sleeps on the keyboard, in the third it drinks coffee, and in the last one it chases a mouse.",
    ),
    (
        None,  # only just long enough
        "A small white dog with black ears sits on a green sofa between two striped cushions and looks at the camera, "
        "while a cat sleeps on the carpet in front of it.",
    ),
    (
        None,  # hash and asterisk of a telephone
        "An old telephone with large grey buttons lies on a lace cloth. The keys * and # in the lowest row are worn, and "
        "the cord is tangled. A notepad beside it has the number 555-0199 in blue ink, underlined twice.",
    ),
    # Faulty ones.
    (
        "repeated",
        "The image shows a beach with many umbrellas. The umbrellas are red, red, red, red, red, red, and the sand is "
        "white. People sit below them in folding chairs and look at the sea.",
    ),
    (
        "repeated",
        "The living room has a sofa, a table, a sofa, a table, a sofa, a table, a sofa, a table, a sofa and a table, and "
        "a lamp in the corner that lights the room with a warm light.",
    ),
    (
        "repeated",
        "A man rides a bicycle along a canal. He wears a blue jacket. The sky is clear. A man rides a bicycle along a "
        "canal. The water reflects the trees. A man rides a bicycle along a canal. He wears a helmet.",
    ),
    (
        "repeated",
        "There is a tall building on the left side of the street. There is a tall building on the right side of the "
        "street. There is a small building on the left side of the street. There is a small building on the right side "
        "of the street. There is a red building on the left side of the street. There is a red building on the right "
        "side of the street. There is a blue building on the left side of the street. There is a blue building on the "
        "right side of the street.",
    ),
    (
        "repeated",
        "In the foreground a girl holds a balloon in the air, in the air, in the air above her head, while a boy beside "
        "her eats ice cream and looks up at a kite that is shaped like a bird.",
    ),
    (
        "meaningless",
        "I'm sorry, but I can't provide a description of this image. If you have any other questions or need help with "
        "something else, please feel free to ask and I will do my best to help.",
    ),
    (
        "meaningless",
        "As an AI language model, I do not have the ability to see images, but I could describe one if it was given to me "
        "as a text. A text of that kind would say what is in it and where.",
    ),
    (
        "meaningless",
        "Provide a comprehensive description of this image, including all visual elements, their spatial relationships, "
        "and the overall atmosphere. Provide it in a paragraph of moderate length, please.",
    ),
    (
        "meaningless",
        "**Foreground:** A wooden table with a bowl of fruit and a folded newspaper.\n**Background:** A window with "
        "curtains, behind which a garden with two apple trees is visible.\n**Lighting:** Soft and warm.",
    ),
    (
        "meaningless",
        "0.12 0.55 0.31 0.98 [12, 44, 67, 89] 0.73 0.21 0.44 {0.1, 0.2} person 0.91 0.82 0.77 0.15 0.63 (41, 7) dog 0.12 "
        "0.34 0.56 0.78 0.90 1.00 0.11 0.13 tree 0.17 0.19 0.23 0.29.",
    ),
    (
        "meaningless",
        "<p>A busy street in the rain with many umbrellas, cars and bright signs above the shops on both sides.</p> <br/> "
        "The reflections on the road are red and yellow, and a bus stands at the stop.",
    ),
    (
        "meaningless",
        "USER: What is in the image? ASSISTANT: The image shows a plate of pasta with tomatoes and basil on a wooden "
        "table, next to a glass of red wine and a folded napkin with a fork on it.",
    ),
    ("short", "A dog on a beach."),
    ("short", ""),
    (
        "short",  # the rest of it is unfinished
        "A bridge crosses a river. Its arches are made of grey stone that has been darkened by centuries of smoke and "
        "rain, and between them barges with coal and timber pass from early morning until late in the",
    ),
)
