"""Guarantee 12, as far as actors go: same seed, same run."""

from __future__ import annotations

from tidewal.runtime.actor import ActorSystem
from tidewal.runtime.testing.clock import run_virtual


def test_one_seed_gives_one_trace(kit, seed):
    def trace(random_seed: int) -> list[tuple[object, ...]]:
        recorder = kit.Recorder()

        async def main() -> None:
            async with ActorSystem(observer=recorder, threads=False, random_seed=random_seed) as system:
                refs = [await system.spawn(kit.Scripted, name=f"a{n}") for n in range(3)]
                for ref in refs:
                    ref.tell(kit.fail(RuntimeError(ref.name)))
                    ref.tell(lambda actor: recorder.events.append((actor.name, system.loop.time())))
                await kit.elapse(5)

        run_virtual(main())
        return recorder.events

    assert trace(seed) == trace(seed)
    assert trace(seed) != trace(seed + 1)
