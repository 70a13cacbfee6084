"""UQ4CT's objectives against hand-worked values, finite differences, and the shares of two ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.models.mixlora.flc import functional_confidence
from components.models.mixlora.routing import RouterRecord, Routing
from components.training.objectives.balance import balance_share, expert_counts, z_loss_share
from components.training.objectives.calibration import calibration_loss_sum
from components.training.objectives.correctness import correctness
from components.training.objectives.cross_entropy import cross_entropy_sum, gold_cross_entropy_sum

VOCABULARY = 8


def routing_of(*logits: torch.Tensor, k: int, experts: torch.Tensor | None = None) -> Routing:
    """One router for each of the logits [M, N]; the choices follow from them unless given."""
    records = []
    for z in logits:
        probs = z.softmax(dim=-1)
        records.append(RouterRecord(z, probs, probs.topk(k).indices if experts is None else experts))
    return Routing(tuple(records), torch.ones(1, len(logits[0]), dtype=torch.bool))


def balance(routing: Routing, over: str = "layer") -> float:
    return float(balance_share(routing, expert_counts(routing), over))


class TestBalance:
    @pytest.mark.parametrize("k", [1, 2, 3])
    def test_perfect_balance_gives_k(self, k):
        """An indifferent router, P = 1/N, whose choices are even, F[j] = 1/N: N * k * N * 1/N^2 = k."""
        n = 4
        experts = (torch.arange(n)[:, None] + torch.arange(k)) % n
        assert balance(routing_of(torch.zeros(n, n), k=k, experts=experts)) == pytest.approx(k, rel=1e-6)

    def test_collapse_to_one_expert_gives_n(self):
        """F[0] and P are both 1 for one expert: N * 1 * 1."""
        logits = torch.zeros(6, 5)
        logits[:, 3] = 200.0
        assert balance(routing_of(logits, k=1)) == pytest.approx(5.0, rel=1e-6)

    def test_known_value(self):
        """Two tokens, N 2, k 1, p = (.75, .25) both: F = (1, 0), P = (.75, .25), so 2 * .75 = 1.5."""
        logits = torch.tensor([[math.log(3.0), 0.0]] * 2)
        assert balance(routing_of(logits, k=1)) == pytest.approx(1.5, rel=1e-6)

    def test_layers_that_collapse_on_different_experts_cancel_in_the_pool_only(self):
        """Layer 0 sends all to expert 0, layer 1 all to expert 1, N 2: per layer 2 each, pooled 1 as if balanced."""
        one = torch.tensor([[200.0, 0.0]] * 3)
        collapsed = routing_of(one, one.flip(1), k=1)
        assert balance(collapsed, "layer") == pytest.approx(2.0, rel=1e-6)
        assert balance(collapsed, "pooled") == pytest.approx(1.0, rel=1e-6)

    def test_pooled_is_moe_pefts_formula(self):
        """Logits of all layers and tokens concatenated, F over k x N, N * sum(F * P)."""
        layers = [torch.randn(7, 4), torch.randn(7, 4) + torch.arange(4.0)]
        probs = torch.cat(layers).softmax(dim=-1)
        chosen = torch.nn.functional.one_hot(probs.topk(2).indices, 4).float().mean(dim=0)
        expected = 4 * (chosen * probs.mean(dim=0)).sum()
        assert balance(routing_of(*layers, k=2), "pooled") == pytest.approx(float(expected), rel=1e-6)

    @pytest.mark.parametrize("over", ["layer", "pooled"])
    def test_gradient_agrees_with_finite_differences(self, over):
        experts = torch.tensor([[0, 1], [2, 0], [1, 2]])
        counts = expert_counts(routing_of(torch.zeros(3, 3), torch.zeros(3, 3), k=2, experts=experts))
        logits = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        assert torch.autograd.gradcheck(
            lambda *z: balance_share(routing_of(*z, k=2, experts=experts), counts, over), logits
        )


class TestZLoss:
    def test_uniform_logits(self):
        """Logits c over N experts: logsumexp = c + ln N."""
        routing = routing_of(torch.full((5, 4), 2.0), torch.full((5, 4), -1.0), k=1)
        expected = ((2 + math.log(4)) ** 2 + (-1 + math.log(4)) ** 2) / 2
        assert float(z_loss_share(routing, expert_counts(routing))) == pytest.approx(expected, rel=1e-6)

    def test_gradient_agrees_with_finite_differences(self):
        logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        counts = expert_counts(routing_of(logits.detach(), k=2))
        assert torch.autograd.gradcheck(lambda z: z_loss_share(routing_of(z, k=2), counts), (logits,))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["layer", "pooled"]))
def test_two_ranks_shares_sum_to_the_whole(mine, theirs, layers, k, over):
    """Values and gradients, however unevenly the tokens are dealt; only the counts are known to both."""
    whole = [torch.randn(mine + theirs, 4, dtype=torch.float64, requires_grad=True) for _ in range(layers)]
    counts = expert_counts(routing_of(*whole, k=k))
    parts = [routing_of(*(z[:mine] for z in whole), k=k), routing_of(*(z[mine:] for z in whole), k=k)]
    assert torch.equal(sum(expert_counts(part) for part in parts), counts)
    for share in (lambda r, c: balance_share(r, c, over), z_loss_share):
        expected = share(routing_of(*whole, k=k), counts)
        found = sum(share(part, counts) for part in parts)
        torch.testing.assert_close(found, expected)
        for got, wanted in zip(torch.autograd.grad(found, whole), torch.autograd.grad(expected, whole), strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_ranks_own_balance_is_not_its_share():
    """Each rank's tokens go to one expert of two, another one on each: balanced together (1), collapsed apart (2)."""
    mine = torch.tensor([[200.0, 0.0]] * 3)
    routings = [routing_of(z, k=1) for z in (mine, mine.flip(1))]
    counts = sum(expert_counts(r) for r in routings)
    assert float(sum(balance_share(r, counts, "layer") for r in routings)) == pytest.approx(1.0, rel=1e-6)
    assert sum(balance(r) for r in routings) / 2 == pytest.approx(2.0, rel=1e-6)


class TestCalibration:
    def test_known_value(self):
        """(1 - .9)^2 + (0 - .4)^2 = .17."""
        assert float(calibration_loss_sum(torch.tensor([0.9, 0.4]), torch.tensor([1.0, 0.0]))) == pytest.approx(0.17)

    def test_gradient_agrees_with_finite_differences(self):
        flc = torch.rand(4, dtype=torch.float64, requires_grad=True)
        correct = torch.tensor([1.0, 0.0, 0.3, 1.0], dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda c: calibration_loss_sum(c, correct), (flc,))

    def test_the_indicator_is_a_constant(self):
        correct = torch.ones(2, requires_grad=True)
        loss = calibration_loss_sum(torch.rand(2, requires_grad=True), correct)
        assert torch.autograd.grad(loss, correct, allow_unused=True) == (None,)

    def test_gradient_reaches_the_routers_through_flc(self):
        """Up when right, down when wrong; the softmax over all experts must not be renormalised, else it is 0."""
        logits = torch.randn(2, 4, requires_grad=True)
        routing = Routing(routing_of(logits, k=2).records, torch.ones(2, 1, dtype=torch.bool))
        flc = functional_confidence(routing, torch.zeros(2, 1, dtype=torch.long), "prompt")
        (grad,) = torch.autograd.grad(calibration_loss_sum(flc, torch.tensor([1.0, 0.0])), logits)
        chosen = grad.gather(1, routing.records[0].experts).sum(dim=1)
        assert chosen[0] < 0 < chosen[1]

    def test_lowest_where_confidence_is_the_chance_to_be_right(self):
        """With 3 of 4 right the best constant is .75."""
        correct = torch.tensor([1.0, 1.0, 1.0, 0.0])
        grid = torch.linspace(0, 1, 101)
        losses = torch.stack([calibration_loss_sum(c.expand(4), correct) for c in grid])
        assert float(grid[losses.argmin()]) == pytest.approx(0.75)


def question(options, answer, prompt=(1, 2)):
    return EncodedQuestion("q", tuple(prompt), tuple(tuple(o) for o in options), answer)


def saying(batch, tokens: list[int]) -> torch.Tensor:
    """Logits whose argmax at the i-th gold entry is the i-th token; positions that entries share must agree."""
    logits = torch.zeros(len(batch.positions), VOCABULARY)
    logits[batch.entry_position, torch.tensor(tokens)] = 5.0
    return logits


class TestCorrectness:
    def test_the_right_option_must_score_highest(self):
        """p(3) > p(4): right for the question whose answer is option 0, wrong for the other."""
        batch = collate([question([(3,), (4,)], 0), question([(3,), (4,)], 1)], pad_id=0)
        logits = torch.zeros(2, VOCABULARY)
        logits[:, 3] = 1.0
        assert correctness(logits, batch, "options").tolist() == [1.0, 0.0]

    def test_absent_options_are_never_the_answer(self):
        batch = collate([question([(3,)], 0), question([(3,), (4,), (5,)], 2)], pad_id=0)
        logits = torch.full((2, VOCABULARY), -3.0)
        logits[1, 5] = 2.0
        assert correctness(logits, batch, "options").tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        ("said", "exact", "f1"),
        [
            ([3, 4, 3], 1.0, 1.0),
            ([4, 3, 3], 0.0, 1.0),  # the same bag in another order
            ([3, 4, 5], 0.0, 2 / 3),
            ([3, 3, 3], 0.0, 2 / 3),  # 3 stands twice in the answer, so the third 3 earns nothing
            ([4, 4, 4], 0.0, 1 / 3),
            ([5, 6, 7], 0.0, 0.0),
        ],
    )
    def test_teacher_forced_answers(self, said, exact, f1):
        """The right answer is 3 4 3."""
        batch = collate([question([(3, 4, 3)], 0)], pad_id=0, options="gold")
        logits = saying(batch, said)
        assert correctness(logits, batch, "exact_match").tolist() == [exact]
        assert correctness(logits, batch, "token_f1").tolist() == pytest.approx([f1])

    @pytest.mark.parametrize(("kind", "expected"), [("exact_match", [0.0, 1.0]), ("token_f1", [0.5, 1.0])])
    @pytest.mark.parametrize("options", ["gold", "all"])
    def test_rows_do_not_mix_and_other_options_do_not_count(self, kind, expected, options):
        """Row 0 says 6 6 for 5 6, row 1 says 5 for 5; in one bag row 0 would be all right and row 1 wrong."""
        questions = [question([(4,), (5, 6)], 1), question([(5,), (7,)], 0, prompt=(2,))]
        batch = collate(questions, pad_id=0, options=options)
        answers = [0, 0] if options == "gold" else [1, 0]
        gold = [slot == row * batch.option_mask.shape[1] + answers[row] for slot, row in slots_and_rows(batch)]
        logits = torch.zeros(len(batch.positions), VOCABULARY)
        logits[batch.entry_position[torch.tensor(gold)], torch.tensor([6, 6, 5])] = 3.0
        assert correctness(logits, batch, kind).tolist() == expected


def slots_and_rows(batch) -> list[tuple[int, int]]:
    return [(slot, slot // batch.option_mask.shape[1]) for slot in batch.entry_slot.tolist()]


def test_cross_entropy_of_gold_entries_is_that_of_the_gold_batch(training, encoded):
    """The model's logits at the right answer are the same whether other options ride along in the row or not."""
    model = training("sft").model
    batches = [collate(encoded[:8], 0, options) for options in ("gold", "all")]
    with torch.no_grad():
        expected = cross_entropy_sum(model(batches[0]), batches[0])
        found = [gold_cross_entropy_sum(model(batch), batch) for batch in batches]
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1], expected)
    assert float(cross_entropy_sum(model(batches[1]), batches[1]).detach()) > 1.5 * float(expected)
