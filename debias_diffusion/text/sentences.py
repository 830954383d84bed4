"""A caption's sentences."""

import itertools
import re

# What a full stop behind a word may be instead of an end; words in lower case, without their last full stop.
_ABBREVIATIONS = {
    # Within a name: an end only before one of `_OPENERS`.
    "name": "mr mrs ms messrs dr drs prof st ste mt rev hon esq pres gov sen rep gen col maj capt cmdr lt sgt cpl pvt "
    "jr sr ave blvd rd ln inc ltd co corp bros dept univ hosp inst assn natl intl bldg "
    "fr hr dhr mevr str ul sra srta dra sta sto av ud ee uu sig "
    "dott avv sok cad jl ул вул им ім डॉ",
    # Something must follow.
    "opening": "e.g i.e vs cf viz approx ca a.k.a esp incl inkl bijv bspw vgl sog np např esim pl",
    # No end before a number ...
    "reference": "no nos fig figs vol vols p pp pg ch chap op est nr núm pág abb bd kap kl рис стр",
    # ... and these only with a capital: a cat sat, but Sat. 14 June.
    "date": "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun",
    # Behind a number: an end before a capital.
    "unit": "in ft yd mi sq cu fl oz lb lbs pt qt gal mm cm m km g kg l ml hr hrs min sec m.p.h r.p.m тыс млн руб",
    # The same, behind anything.
    "closing": "etc al usw bzw ex ej ecc enz osv itd itp vb stb др т.д т.п",
    # The same, but a day or a time zone may follow.
    "time": "a.m p.m",
}
_KINDS = {word: kind for kind, words in _ABBREVIATIONS.items() for word in words.split()}
# Words that begin sentences and no names: articles, pronouns, conjunctions, prepositions, adverbs.
_OPENERS = frozenset(
    "the a an this that these those there here it its he his she her they their we our you your i my what which "
    "when where why how if although though because since while as so yet and but or nor not both each every either "
    "neither all any some several many most more few another other one two three four five six seven eight nine ten "
    "about above across after against along among around at before behind below beneath beside besides between beyond "
    "by despite during for from in inside into like near next of off on onto opposite out outside over past through to "
    "toward towards under underneath until up upon with within without is are was were also overall then however "
    "meanwhile only just perhaps nearby everything everyone nothing nobody o os um uma une il gli ein eine het".split()
)
_REQUESTS = frozenset("continue note please remember see".split())  # begin sentences even behind "e.g."
# A single letter behind these is no initial.
_LETTERED = frozenset(
    "letter letters marked type platform gate row seat section terminal exit grade group block hall room zone track "
    "class level line vitamin plan size figure point option panel".split()
)
_GERMAN_ARTICLES = frozenset("im am vom zum beim der die das den dem des".split())
_ACRONYM = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,3}")  # "U.S", "Ph.D"
_ORDINAL = re.compile(r"\d{1,2}|[IVX]+")
_NUMBER = re.compile(r"\d.*|[B-HJ-Z]|[IVX]{2,}")
_AFTER_TIME = re.compile(r"[A-Z]{2,}|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?")  # "8 p.m. EST"
_LIST_MARK = re.compile(r"(?:[-*•–]\s+)?\(?(?:(?:(?:Step|Panel|Scene|Part) )?\d{1,3}|[a-zA-Z]|[ivx]+|[IVX]+)|.*:\s+1")
_FOLLOWS = re.compile(r"[^\w#@]{0,8}(\w\.|\w*)")  # the next word, or initial with its full stop

_STOPS = ".!?…‼⁇⁈⁉"
_SURE_STOPS = "。！？｡।॥؟۔։።፧။។៕"  # they are nothing else, and white space need not follow
_OPENING, _CLOSING = "\"'“‘«„([*_", "\"'“”’«»›)]*_」』）】》"
_LOOKBACK = 48  # characters before a stop that matter; without a limit, long captions would be slow


def _candidates() -> re.Pattern:
    """Finds stops and line breaks that may be ends, and passes over short quotations and brackets up to their stops.

    It takes the first character from one set and looks at it afterwards: that lets `re` skip the others fast.
    """
    stops, emoji = _STOPS + _SURE_STOPS, "\U0001f300-\U0001faff"
    passed = [rf'(?<=["“”„«»])(?<![^\s([].)(?=[^"“”„«»]{{1,240}}["“”«»]).*?(?=[{stops}]*\s?["“”«»])']
    for opening, closing in ("「」", "『』", "()", "（）"):
        inside = rf"[^{opening}{closing}]{{1,240}}"
        passed.append(rf"(?<=[{opening}])(?={inside}[{closing}]).*?(?=[{stops}]*[{closing}])")
    stop = (
        rf"(?<=[{stops}{emoji}])[{stops}]*(?:\s\.(?!\w))*[{re.escape(_CLOSING)}]*(?:\s»)?"
        rf"(?:\s*[{emoji}\u2600-\u27bf\u200d\ufe0f])*(?P<stop>\s*)"
    )
    broken = r"(?<=\n)(?P<broken>[^\S\n]*\n|(?=[^\S\n]*(?:[-*•–▪◦●]|\(?(?:\d{1,3}|[a-zA-Z])[.)])\s))"
    return re.compile(rf"""[{stops}{emoji}\n"“”„«»「『(（](?:{stop}|{broken}|{"|".join(passed)})""", re.DOTALL)


_CANDIDATES = _candidates()


def split_sentences(caption: str) -> list[str]:
    """The sentences of `caption` in order, each with its closing marks, without white space around it.

    Abbreviations ("Mr. Lee", "e.g.", "U.S. flag"), initials, decimals ("3.5 m"), list numbers ("2. A dog"), an ellipsis
    inside a sentence and stops inside a short quotation or bracket do not end one; a blank line does, and a line break
    before a list's item. A missing last full stop is no matter. A caption without any text has no sentences.
    """
    bounds = itertools.pairwise([0, *sentence_ends(caption), len(caption)])
    return [sentence for start, end in bounds if (sentence := caption[start:end].strip())]


def sentence_ends(caption: str) -> list[int]:
    """Where the sentences of `split_sentences` but the last end, white space behind them included, in characters."""
    ends = [0]
    for match in _CANDIDATES.finditer(caption):
        kind = match.lastgroup
        if kind == "broken" or (kind == "stop" and _ends(caption, ends[-1], *match.span(), match["stop"])):
            ends.append(match.end())
    return ends[1:]


def join_sentences(sentences: list[str]) -> str:
    """The caption made of `sentences`: joined by one space, full stops kept."""
    return " ".join(sentences)


def _ends(caption: str, start: int, stop: int, end: int, space: str) -> bool:
    """Whether the stops from `stop` to `end`, the white space behind included, end the sentence begun at `start`."""
    if end == len(caption) or space.count("\n") > 1:
        return True
    stops, text = caption[stop : end - len(space)], caption[max(start, stop - _LOOKBACK) : stop].strip()
    words = text.rsplit(None, 2)
    word = words[-1].lstrip(_OPENING) if words else ""
    follows = _FOLLOWS.match(caption, end)[1]
    lower = follows[:1].islower() and follows.islower()  # "iPhone" is not
    closed = stops[-1] in _CLOSING
    if stops[0] in _SURE_STOPS:  # a question quoted is often part of a sentence, and before a particle anything is
        return bool(space) or not closed or (stops[0] not in "！？" and caption[end] not in "とっのをが")
    if not space and not _is_glued(word, stops, follows, caption[end : end + 2]):
        return False
    if stops[0] not in _STOPS:  # an emoji
        return not lower and follows.lower() in _OPENERS
    if closed or stops[0] == "…" or stops.count(".") > 1:
        return not lower  # '"Stop!" he said', "a cat ... asleep"
    if stops[0] != ".":
        return not (lower and len(words) > 1 and word[:1].isupper())  # "the Yahoo! logo"
    plain = word.isalpha() and (len(word) > 3 or (len(word) > 1 and len(words) > 1 and not lower))
    if plain and word.lower() not in _KINDS:
        return True  # nearly always
    previous = words[-2] if len(words) > 1 else ""
    capitals = _FOLLOWS.match(caption, start)[1][:1].isupper()
    return not _LIST_MARK.fullmatch(text) and _full_stop_ends(previous, word, follows, lower, capitals)


def _is_glued(word: str, stops: str, follows: str, next_two: str) -> bool:
    """Whether `stops` between `word` and what follows may end a sentence although white space is missing."""
    if stops.strip("!?") not in ("", ".") or len(word) < 2 or not next_two[0].isalpha():
        return False
    if next_two[0].isupper():  # "a red collar.The grass", "Mary.She", but "Booking.Com", "Sunn.O"
        if len(follows) > 1 and follows.lower() in _OPENERS:
            return True
        return word.isalnum() and (word.islower() or word.isdigit()) and (next_two[1:].islower() or next_two[1:] == " ")
    caseless = word[-1] + next_two[0]
    return caseless.isalpha() and caseless.lower() == caseless.upper()


def _full_stop_ends(previous: str, word: str, follows: str, lower: bool, capitals: bool) -> bool:
    """Whether a full stop behind the words `previous` and `word` ends a sentence, when the word `follows` comes next.

    `lower`: that one is in lower case. `capitals`: the sentence began with a capital.
    """
    opener = not lower and follows.lower() in _OPENERS
    if _ORDINAL.fullmatch(word) and ((lower and capitals) or (previous.lower() in _GERMAN_ARTICLES and not opener)):
        return False  # "3. katın", "im 2. Stock"
    head, _, word = word.rpartition("-")  # "Mon.-Fri", "5-in"
    kind, unit = _KINDS.get(word.lower()), word.lstrip("0123456789.,")
    numbered = unit != word or (head or previous)[-1:].isnumeric()
    numbered = numbered or (previous[-1:] == "." and _KINDS.get(previous[:-1]) == "unit")  # "12 fl. oz."
    if numbered and (len(unit) == 1 or _KINDS.get(unit.lower()) == "unit"):
        return not lower and not follows[:1].isdigit()
    if kind == "opening":
        return not lower and follows.lower() in _REQUESTS
    if kind == "reference" or (kind == "date" and word[0].isupper()):
        # "Fig. A", but "He ate a fig. A cat came."
        lettered = kind == "reference" and follows == "A" and word[0].isupper() and word != "No"
        return not lettered and not _NUMBER.fullmatch(follows) and not (lower and word[0].isupper())
    if kind in ("closing", "time"):
        return not lower and not (kind == "time" and _AFTER_TIME.fullmatch(follows))
    if len(word) == 1 and word.isalpha() and word < "\u1100" and word != "I":  # an alphabet's, no syllable
        return opener or (not lower and previous.lower() in _LETTERED)
    if kind == "name" or _ACRONYM.fullmatch(word):
        return opener
    # Without vowels, and the sentence goes on: an abbreviation that is not listed.
    return not (lower and capitals and word.isascii() and word.isalpha() and not set(word.lower()) & set("aeiouy"))
