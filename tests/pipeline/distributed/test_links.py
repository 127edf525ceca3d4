"""A bad link: lost packets and a cable that is pulled for a while change no bit, and one that stays down ends
both ranks."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import shaped_links as links

from penstock import TransportError

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SCRIPT = """
import hashlib, sys, torch, penstock
from torch import nn
torch.set_num_threads(1)
penstock.init(deadline=60)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
x, y = torch.randn(64, 64), torch.arange(64) % 4
profile = penstock.measure(penstock.trace(model, (x[:16],)), (x[:16],), repeats=1)
pipe = penstock.Pipeline(
    model, penstock.partition(profile, cuts=["_1"], micro_batches=4, codec="raw"),
    loss=nn.functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    deadline=float(sys.argv[1]),
)
try:
    for number in range(40):
        losses = pipe.step(x, y).loss
        print("step", flush=True)
        if number == 3:
            sys.stdin.readline()
except penstock.TransportError as error:
    print(error, flush=True)
    sys.exit()
state = pipe.state_dict()["model"]
said = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
print("bits", said.hexdigest() if pipe.rank == 0 else "", losses, flush=True)
pipe.close()
"""
LOSS = "iptables -A INPUT -i {} -p tcp -m statistic --mode random --probability 0.05 -j DROP"


def trained(folder, *, before=lambda ends: None, meanwhile=lambda ends: None, deadline=45):
    """Last output of two ranks on two ends of a link; ``before`` is called while they wait after some steps,
    and ``meanwhile`` when they go on."""
    link = links.parse_link("1Gbit")
    (folder / "script.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:
        try:
            ends = stack.enter_context(links.joined(link))
        except TransportError as error:
            pytest.skip(f"no network namespaces here: {error}")
        command = [sys.executable, str(folder / "script.py"), str(deadline)]
        started = [stack.enter_context(script_on(end, rank, command)) for rank, end in enumerate(ends)]
        try:
            for process in started:
                assert process.stdout is not None
                for _ in range(4):
                    assert process.stdout.readline() == "step\n"
            before(ends)
            for process in started:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            meanwhile(ends)
            printed = [process.communicate(timeout=150) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], printed
    return [out.splitlines()[-1] for out, _ in printed]


def script_on(end, rank, command):
    """A rank as a foreign launcher starts it: it meets at a store that listens, which rank 0 holds."""
    surroundings = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": links.ADDRESSES[0]}
    surroundings |= {"MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": links.DEVICE}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*end, *command], env=os.environ | surroundings, text=True, **pipes)


def lossy(ends):  # 5 % each way, as gloo sees it a slow link
    for end in ends:
        done = subprocess.run([*end, *LOSS.format(links.DEVICE).split()], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no packet filter that drops at random: {done.stderr.strip()}")


def down(ends):
    subprocess.run([*ends[0], *f"ip link set {links.DEVICE} down".split()], check=True)


def pulled(ends):
    down(ends)
    time.sleep(10)
    subprocess.run([*ends[0], *f"ip link set {links.DEVICE} up".split()], check=True)


@pytest.mark.parametrize("meanwhile", [lossy, pulled])
def test_a_bad_link_changes_no_bit(meanwhile, tmp_path):
    assert trained(tmp_path, meanwhile=meanwhile) == trained(tmp_path)


def test_a_link_that_goes_down_ends_both_ranks_even_the_one_whose_store_is_beyond_it(tmp_path):
    for rank, told in enumerate(trained(tmp_path, before=down, deadline=10)):
        assert f"did not arrive from rank {1 - rank} within 10 s" in told
