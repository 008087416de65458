from __future__ import annotations

import pytest

from headway.errors import ConfigError
from headway.workload import parse_workload


def test_mixed_64_is_what_others_measure():
    work = parse_workload("mixed-64")
    assert len(work.items) == 64
    assert work.num_prompt_tokens == 9_996
    assert work.num_output_tokens == 5_371
    assert {item.at for item in work.items} == {0.0}
    assert all(32 <= len(item.prompt_token_ids) <= 256 for item in work.items)
    assert all(8 <= item.num_output_tokens <= 256 for item in work.items)


def test_arrivals_are_a_seeded_poisson_process():
    work = parse_workload("mixed-64@2")
    times = [item.at for item in work.items]
    assert times == sorted(times)
    assert 20 < times[-1] < 45
    assert work == parse_workload("mixed-64@2")


@pytest.mark.parametrize("text", ["mixed", "mixed-64@", "mixed-64@0", "mixed-64@x", "mixed-64@nan"])
def test_what_is_no_workload_is_refused(text: str):
    if text.endswith("@"):
        assert parse_workload(text) == parse_workload("mixed-64")
        return
    with pytest.raises(ConfigError):
        parse_workload(text)
