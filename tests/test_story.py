"""The story of the toy world: its scores and examples."""

from helpers.story import CUT, WHOLE, generation_report, page_of, results

from debias_diffusion.eval.story import tell

NAMES = (CUT, WHOLE, "Long-CLIP", "DeBias-CLIP", "DeBias-CLIP for SDXL")


def test_it_begins_with_what_reading_whole_gains(tmp_path):
    lead = tell(results(tmp_path))["lead"]
    assert "5 long prompts" in lead and lead.index("41%") < lead.index("31%")


def test_the_story_is_of_long_captions_and_of_any_encoders(tmp_path):
    assert tell([(tmp_path, generation_report(data="toy/short-test"))]) is None
    # Without images, short prompts and the encoders of the lead.
    page = page_of(tell([(tmp_path, generation_report(("long-clip", "runs/b")))]), tmp_path)
    assert ["runs/b", "41.4 (40.4 to 43.4)", "85.0", "10.0", "41.1", "-"] in page.rows
    assert not page.all("img") and "as stock SDXL does" not in page.text


def test_the_page_has_scores_and_examples(tmp_path):
    page = page_of(tell(results(tmp_path)), tmp_path)
    page.check_is_self_contained()
    # (20 * 45% + 10 * 0%) / 30 of the later objects; short prompts have the same scores here
    assert [row[0] for row in page.rows[1:6]] == list(NAMES)
    assert ["DeBias-CLIP", "61.4 (60.4 to 63.4)", "75.0", "30.0", "43.1", "61.4"] in page.rows
    assert len(page.all("img")) == 1
