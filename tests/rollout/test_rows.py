import torch

from rl2lightning.rollout.rows import Request, Rows
from rl2lightning.types import SamplingParams


def rows(stop_token_ids: tuple[int, ...], *, limit: int = 9, name: str = "r") -> Rows:
    request = Request(name, [1], SamplingParams(), 0, 0, limit, stop_token_ids)
    return Rows.of([request], torch.tensor([0]), torch.device("cpu"))


def certain(*tokens: int) -> torch.Tensor:
    """Logits [R, 8] that leave no choice."""
    logits = torch.full((len(tokens), 8), -torch.inf)
    logits[range(len(tokens)), tokens] = 0.0
    return logits


def test_rows_with_more_and_with_fewer_stop_tokens_join():
    joined = Rows.join([rows((5,), name="a"), rows((5, 6, 7), name="b"), rows((), name="c")])
    joined.sample(certain(0, 0, 0))  # what fills up the table of stop tokens is none
    assert joined.finished() == []
    joined.sample(certain(6, 6, 6))
    assert [c.request_id for c in joined.finished()] == ["b"]
    joined.sample(certain(5, 5, 5))
    (done,) = joined.finished()
    assert (done.request_id, done.token_ids, done.logps, done.finish_reason) == ("a", [0, 6, 5], [0.0] * 3, "stop")
    assert joined.num_alive == 1


def test_rows_of_different_progress_keep_their_own_tokens_when_they_join():
    old = rows((), limit=40, name="old")
    for token in (3, 4, 5) * 10:
        old.sample(certain(token))
    new = rows((), limit=2, name="new")
    new.sample(certain(1))
    joined = Rows.join([new, old])
    joined.sample(certain(2, 6))
    (done,) = joined.finished()
    assert (done.request_id, done.token_ids, done.finish_reason) == ("new", [1, 2], "length")
    for token in range(5):
        joined.sample(certain(7, token))
    (aborted,) = joined.abort({"old", "new"})
    assert aborted.token_ids == [3, 4, 5] * 10 + [6, 0, 1, 2, 3, 4]


def test_selecting_rows_moves_their_padding():
    joined = Rows.join([rows((), name="a"), rows((), name="b"), rows((), name="c")])
    chosen = joined.select(torch.tensor([2, 0]), pad_by=3)
    assert [request.request_id for request in chosen.requests] == ["c", "a"]
    assert (chosen.pad.tolist(), chosen.num_alive) == ([3, 3], 2)
