"""Each wait that may be missing and each early reuse, planted: the late device must find it out."""

import pytest
from cases import Case, plan_of
from late import LateDevice, LateKernels, LateWork, Past
from law import differences, rank_differences

from penstock.compression.frame import read_header
from penstock.pipeline.ranks.device_frame import DeviceFrame, DevicePool
from penstock.pipeline.ranks.staged import StagedTransport
from penstock.pipeline.runtime.device_frames import _Lanes


def no_wait_for_what_is_unpacked(patch):
    patch.setattr(LateDevice, "wait_for", lambda device, work: None)


def a_buffer_given_back_at_once(patch):
    patch.setattr(DevicePool, "give_behind", lambda pool, works, give: give())


def a_frame_that_does_not_note_its_users(patch):
    made = DeviceFrame.__init__

    def forgetful(frame, *args, **kwargs):
        made(frame, *args, **kwargs)
        frame.uses = _Forgetful(frame.uses)

    patch.setattr(DeviceFrame, "__init__", forgetful)


class _Forgetful(list):
    def append(self, work):
        pass


def packing_before_it_was_computed(patch):
    patch.setattr(LateDevice, "reached", lambda device: Past(computed=False))


def a_header_of_what_is_not_packed(patch):
    patch.setattr(LateKernels, "header_of", lambda work: read_header(work.value))


def a_sender_that_does_not_wait_for_its_copy(patch):
    patch.setattr(LateWork, "wait", lambda work: None)


def a_slab_that_goes_before_it_was_read(patch):
    brought = _Lanes.brought

    def early(lanes, slab, header):
        frame = brought(lanes, slab.hold(), header)
        slab.pool.give(slab.buffer)
        return frame

    patch.setattr(_Lanes, "brought", early)


def a_frame_that_goes_before_it_was_sent(patch):
    brought = StagedTransport._brought

    def early(transport, frame):
        frame.pool.give(frame.buffer)
        return brought(transport, frame.hold())

    patch.setattr(StagedTransport, "_brought", early)


ALONE = [
    no_wait_for_what_is_unpacked,
    packing_before_it_was_computed,
    a_header_of_what_is_not_packed,
]
RANKS = [
    a_sender_that_does_not_wait_for_its_copy,
    a_slab_that_goes_before_it_was_read,
    a_frame_that_goes_before_it_was_sent,
    a_buffer_given_back_at_once,
    a_frame_that_does_not_note_its_users,
    no_wait_for_what_is_unpacked,
]


def outcome(run, plant):
    """Whether a run with a plant is found out: by an error, or by bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateDevice, "delay", lambda device: 0.01)  # never by luck in time
        plant(patch)
        try:
            return run()
        except Exception as error:  # an error is how most of them show
            return [repr(error)]


@pytest.mark.parametrize("plant", ALONE, ids=lambda plant: plant.__name__)
def test_what_is_planted_in_one_process_is_found(plant):
    case = Case(model="PoolOfRelu", cuts="every", micro_batches=5, late=(0,))
    assert differences(case) == []
    assert outcome(lambda: differences(case), plant) != []


def planted(case, path, random_layers, plant):
    """On a rank; an error, since ranks that lost each other leave no group together."""
    found = outcome(lambda: rank_differences(case, path, random_layers), globals()[plant])
    assert not found, f"found out: {found[0]}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=pytest.mark.slow if place > 1 else ()) for place, plant in enumerate(RANKS)],
    ids=lambda plant: plant.__name__,
)
def test_what_is_planted_between_ranks_is_found(plant, ranks, tmp_path):
    case = Case(model="PoolOfRelu", cuts=["relu"], micro_batches=5, late=(0, 1), deadline=4)
    plan, random_layers = plan_of(case)
    plan.save(tmp_path / "plan.json")
    told = case, str(tmp_path / "plan.json"), random_layers, plant.__name__
    assert any("found out" in text for text, _ in ranks.try_run(planted, *told, ranks=2))
