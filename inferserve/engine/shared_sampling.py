"""Sampling for several ranks: the leader's sampler chooses, the others hear on the device what it chose."""

from __future__ import annotations

from typing import Protocol

import torch

from inferserve.engine.step import Ints
from inferserve.parallel.ranks import LEADER, Ranks
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.sampler import Sampled, Sampler


class TokenChooser(Protocol):
    """What the runner asks for the next tokens; see `Sampler`."""

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """A sequence takes `row`."""
        ...

    def close_row(self, row: int) -> None:
        """The sequence left `row`."""
        ...

    def sample(self, logits: torch.Tensor, rows: Ints, out_position: Ints) -> Sampled:
        """One token for each row of logits [S, vocab]."""
        ...


class LeadingSampler:
    """Chooses, and tells ids and failures of the step to the others: int32 [2, S]."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._sampler = sampler
        self._ranks = ranks

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See TokenChooser."""
        self._sampler.open_row(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        """See TokenChooser."""
        self._sampler.close_row(row)

    def sample(self, logits: torch.Tensor, rows: Ints, out_position: Ints) -> Sampled:
        """See TokenChooser."""
        sampled = self._sampler.sample(logits, rows, out_position)
        self._ranks.from_leader(torch.stack((sampled.token_ids.int(), sampled.failed.int())))
        return sampled


class FollowingSampler:
    """Takes what the leader chose. Logprobs and alternatives are the leader's to report."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See TokenChooser."""

    def close_row(self, row: int) -> None:
        """See TokenChooser."""

    def sample(self, logits: torch.Tensor, rows: Ints, out_position: Ints) -> Sampled:  # noqa: ARG002
        """See TokenChooser."""
        told = torch.empty((2, len(rows)), dtype=torch.int32, device=logits.device)
        ids, failed = self._ranks.from_leader(told)
        unknown = torch.full((len(rows),), torch.nan, dtype=torch.float32, device=logits.device)
        return Sampled(ids.long(), unknown, failed.bool(), None)


def shared(sampler: Sampler, ranks: Ranks) -> TokenChooser:
    """What `ranks.rank` uses, where the leader samples with `sampler`."""
    if ranks.size == 1:
        return sampler
    return LeadingSampler(sampler, ranks) if ranks.rank == LEADER else FollowingSampler(ranks)
