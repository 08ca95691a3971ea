"""`use_variant` where it is entered in one context and left in another, and where contexts are inherited."""

import asyncio
import contextvars
import threading

import pytest
import torch

import effops
from effops.dispatch.choice import current_variant


def naive():
    with effops.use_variant("naive"):
        yield


@pytest.fixture
def compiled(request):
    """A compiled function of the variant that compiled code sees."""
    torch.compiler.reset()
    yield torch.compile(lambda x: x + len(current_variant() or ""), fullgraph=True, backend="eager")
    assert current_variant() is None


def seen(compiled):
    return int(compiled(torch.zeros(())))


def test_left_by_another_task(compiled):
    async def generator():
        with effops.use_variant("naive"):
            yield

    async def main():
        entered = generator()
        await asyncio.create_task(entered.__anext__())
        await entered.aclose()

    asyncio.run(main())
    assert seen(compiled) == 0


def test_left_in_another_context(compiled):
    generator = naive()
    contextvars.copy_context().run(next, generator)
    assert seen(compiled) == len("naive")
    generator.close()
    assert seen(compiled) == 0


def test_left_by_another_thread(compiled):
    generator = naive()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert current_variant() is None
    assert seen(compiled) == 0


def test_left_out_of_order(compiled):
    generators = [naive(), naive()]
    next(generators[0])
    with effops.use_variant("einsum"):
        next(generators[1])
        generators[0].close()
        assert current_variant() == "naive"
        generators[1].close()
        assert current_variant() == "einsum"
        assert seen(compiled) == len("einsum")


def test_a_thread_does_not_inherit_it(compiled):
    """Compiled code in a new thread cannot see it. So no code there does."""

    async def main():
        with effops.use_variant("naive"):
            return await asyncio.to_thread(lambda: (current_variant(), seen(compiled)))

    assert asyncio.run(main()) == (None, 0)


def test_a_task_inherits_it_as_long_as_it_is_entered(compiled):
    async def main():
        begun, left = asyncio.Event(), asyncio.Event()

        async def child():
            inside = current_variant()
            with pytest.raises(RuntimeError, match="pass variant= to the op"):
                seen(compiled)
            begun.set()
            await left.wait()
            return inside, current_variant(), seen(compiled)

        with effops.use_variant("naive"):
            task = asyncio.create_task(child())
            await begun.wait()
        left.set()
        return await task

    assert asyncio.run(main()) == ("naive", None, 0)
