"""Bad records: how many stop a command, and how they are shown."""

import json

import pytest

from debias_diffusion.data.bad_records import BadRecord, check_share, report_bad, too_many
from debias_diffusion.errors import UserError

BAD = [BadRecord(f"{index}.png", "unreadable image" if index else "missing image", "\x1b[2J") for index in range(7)]


@pytest.mark.parametrize(
    ("max_bad", "count", "most"),
    [(0, 10**6, 0), (0.01, 1, 1), (0.01, 199, 1), (0.01, 200, 2), (0.01, 10**6, 10**4), (0.5, 3, 1), (1, 7, 7)],
)
def test_more_than_one_and_more_than_the_share_are_too_many(max_bad, count, most):
    assert not too_many(most, count, max_bad) and too_many(most + 1, count, max_bad)


def test_too_many_name_the_first(capsys):
    check_share(BAD[:1], 7, 0.01)
    check_share([], 7, 0)
    with pytest.raises(UserError, match=r"^7 of 9 .* 0.5 that --max-bad allows. The first: 0.png: .* Do this.$"):
        check_share(BAD, 9, 0.5, "Do this.")


def test_they_are_counted_by_kind_shown_without_control_characters_and_all_listed(tmp_path, capsys):
    report_bad(BAD, tmp_path / "run")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("7 bad records (6 unreadable image, 1 missing image), all in ")
    assert printed[1] == "Left out: 0.png: missing image (\N{REPLACEMENT CHARACTER}[2J)"
    assert len(printed) == 7 and printed[6] == "Left out: 2 more; bad-records.jsonl names all"
    lines = (tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [vars(record) for record in BAD]
