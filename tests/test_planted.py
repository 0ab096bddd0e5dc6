"""The tests see the mistakes that `planted.py` keeps."""

import os
import random

import planted
import pytest

SEED, SHARE = os.environ.get("DRAW_SEED", "0"), float(os.environ.get("SHARE", "1"))
DOZEN = max(1, round(12 * SHARE))


@pytest.mark.parametrize("mistake", planted.mistakes(), ids=lambda mistake: mistake.what[:60])
def test_every_mistake_fits_the_code_and_names_tests_that_there_are(mistake):
    assert not list(mistake.problems())


@pytest.mark.slow
@pytest.mark.always  # draws by itself
def test_a_dozen_mistakes_that_a_seed_draws_or_a_share_of_them_are_all_seen():
    known = planted.mistakes()
    drawn = random.Random(SEED).sample(known, min(DOZEN, len(known)))
    sound = planted.ran(test for mistake in drawn for test in mistake.tests)
    assert sound.code == 0, f"these tests fail without a mistake (DRAW_SEED={SEED}):\n{sound.output}"
    survivors = list(filter(None, map(planted.survives, drawn)))
    assert not survivors, f"not seen (DRAW_SEED={SEED}):\n" + "\n".join(survivors)
