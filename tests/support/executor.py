"""A slow twin of ``verify``: the laws of order in a few lines, and an executor of bounded channels.

It shares no code with the package beyond the instructions: a channel is a row of numbered slots, of which the
first ``consumed + window`` are open; a rank puts its frames in any order, and takes those it needs in any.
"""

import random

from penstock.pipeline.schedules.instruction import Op


def obeys(programs, num_micro_batches, *, asynchronous=False):
    """Every stage: F ascending, B or I ascending, B or W ascending, each after what it needs; U in place."""
    numbers = list(range(num_micro_batches))
    for stage in {each.stage for program in programs for each in program}:
        own = [each for program in programs for each in program if each.stage == stage]
        at = {(each.op, each.micro_batch): place for place, each in enumerate(own) if each.op is not Op.U}
        for ops in (Op.F,), (Op.B, Op.I), (Op.B, Op.W):
            if [each.micro_batch for each in own if each.op in ops] != numbers:
                return False
        for index in numbers:
            whole = (Op.B, index) in at
            first, last = (Op.B, Op.B) if whole else (Op.I, Op.W)
            if whole == ((Op.I, index) in at) or not at[Op.F, index] < at[first, index] <= at[last, index]:
                return False
        updates = [place for place, each in enumerate(own) if each.op is Op.U]
        backwards = [place + 1 for place, each in enumerate(own) if each.op in (Op.B, Op.W)]
        if updates != backwards if asynchronous else updates not in ([], [len(own) - 1]):
            return False
    return True


class Channels:
    """The moves of all ranks; a state is (per rank: place, frames yet to take, frames yet to put)."""

    def __init__(self, programs, edges, window):
        self.programs, self.window = programs, window
        rank_of = {each.stage: rank for rank, program in enumerate(programs) for each in program}
        self.takes, self.puts, self.channel, self.number = {}, {}, {}, {}
        for each in (each for program in programs for each in program):
            way = {Op.F: "down", Op.B: "up", Op.I: "up"}.get(each.op, "nowhere")
            above, below = [a for a, b in edges if b == each.stage], [b for a, b in edges if a == each.stage]
            come, go = {"down": (above, below), "up": (below, above)}.get(way, ((), ()))
            self.takes[each] = frozenset((way, other, each.stage, each.micro_batch) for other in come)
            frames = [(way, each.stage, other, each.micro_batch) for other in go]
            self.puts[each] = frozenset(frames)
            for frame in sorted(frames, key=lambda frame: abs(frame[1] - frame[2])):
                self.channel[frame] = rank_of[frame[1]], rank_of[frame[2]]
                self.number[frame] = sum(self.channel[other] == self.channel[frame] for other in self.number)

    def start(self):
        return tuple(self._arrive(rank, 0) for rank in range(len(self.programs)))

    def _arrive(self, rank, place):
        program = self.programs[rank]
        return place, self.takes[program[place]] if place < len(program) else frozenset(), None

    def moves(self, state):
        """All states that one more take, put or instruction leads to."""
        put, taken = self._progress(state)
        for rank, (place, takes, puts) in enumerate(state):
            if place == len(self.programs[rank]):
                continue
            for frame in takes:
                if frame in put:
                    yield self._with(state, rank, (place, takes - {frame}, None))
            for frame in puts or ():
                channel = self.channel[frame]
                consumed = sum(self.channel[other] == channel for other in taken)
                if channel[0] == channel[1] or self.number[frame] < consumed + self.window:
                    yield self._with(state, rank, (place, takes, puts - {frame}))
            if not takes and puts is None:
                yield self._with(state, rank, (place, takes, self.puts[self.programs[rank][place]]))
            if puts is not None and not puts:
                yield self._with(state, rank, self._arrive(rank, place + 1))

    def _with(self, state, rank, own):
        return (*state[:rank], own, *state[rank + 1 :])

    def _progress(self, state):
        put, taken = set(), set()
        for rank, (place, takes, puts) in enumerate(state):
            program = self.programs[rank]
            for each in program[:place]:
                put |= self.puts[each]
                taken |= self.takes[each]
            if place < len(program):
                taken |= self.takes[program[place]] - takes
                put |= set() if puts is None else self.puts[program[place]] - puts
        return put, taken

    def ended(self, state):
        return all(place == len(program) for (place, _, _), program in zip(state, self.programs, strict=True))

    def runs(self, seed=0):
        """True if the programs end, each move chosen at random."""
        state, chosen = self.start(), random.Random(seed)
        while moves := list(self.moves(state)):
            state = chosen.choice(moves)
        return self.ended(state)

    def outcomes(self):
        """Results of the programs over all interleavings: {True}, {False} or both."""
        seen, waiting, found = set(), [self.start()], set()
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            moves = list(self.moves(state))
            waiting += moves
            if not moves:
                found.add(self.ended(state))
        return found
