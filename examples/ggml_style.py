"""The whole low-level interface, for those who know ggml's: buffers, tensors, events, plans, pins, callbacks, sizes.

Two layers on three CPU devices. `aiopipe.Pipeline` does all of this in one line.
"""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np

import aiopipe as ap

jax.config.update("jax_num_cpu_devices", 3)


def model(weights, x):
    return jnp.tanh(x @ weights["in"]) @ weights["out"]


def observe(tensor, ask):
    if not ask:
        print(f"observed {tensor.name}, of mean {tensor.buffers[0].value.mean():.3f}")
    return tensor.name == "tanh#1"


async def main() -> None:
    w_in, w_out, x = (np.random.default_rng(n).random((n, m), np.float32) for n, m in ((8, 16), (16, 4), (2, 8)))
    want = np.tanh(x @ w_in) @ w_out
    # Backends, in order of priority; the last one is the host.
    print("devices:", ", ".join(device.name for device in ap.devices()))
    first, second, host = ap.open_backends("cpu:1", "cpu:2", "cpu:0")

    # Buffers of a type and usage; tensors in them; element offsets. Host memory is borrowed, not copied.
    region = first.alloc_buffer(4096, buffer_type=first.device.buffer_types()[0], usage=ap.BufferUsage.WEIGHTS)
    tensor_in = region.alloc((8, 16), "float32", "in")
    await first.tensor_set(tensor_in, w_in.ravel()[:64])
    first.tensor_set_async(tensor_in, w_in.ravel()[64:], offset=64)
    tensor_out = host.buffer_from_array(w_out).alloc((16, 4), "float32", "out")
    print(region, region.used_nbytes, "used; two elements:", await first.tensor_get(tensor_in, offset=63, size=2))

    # Queues and events by hand: `second` goes on when `first` is there; the host waits only at the end.
    copied = second.alloc_buffer(4096, usage=ap.BufferUsage.WEIGHTS).alloc((16, 4), "float32", "copy")
    event = first.event_new()
    first.event_record(event)
    second.event_wait(event)
    ap.tensor_copy_async(host, second, tensor_out, copied)
    await second.synchronize()

    # A graph, and a plan of all of it on one backend.
    graph = ap.trace(model, {"in": tensor_in, "out": copied}, x)
    plan = await first.graph_plan_create(graph)
    np.testing.assert_allclose(await first.graph_plan_compute(plan, x), want, rtol=1e-5)
    first.graph_plan_free(plan)

    # The scheduler: sizes before anything runs, a pin, what was decided and why, as text and as a drawing.
    async with ap.Scheduler([first, second, host], n_copies=2) as sched:
        tanh = next(tensor for tensor in graph.tensors if tensor.name == "tanh#1")
        sched.set_tensor_backend(graph, tanh, second)
        print("reserved:", await sched.reserve(graph))
        await sched.alloc_graph(graph)
        decided = await sched.plan(graph)
        print(decided.text(2), decided.dot(), sep="\n\n")

        # An observer, asked about each tensor and then shown it; inputs and outputs tensor by tensor.
        sched.set_eval_callback(observe)
        await sched.tensor_set(graph.inputs[0], x)
        await sched.graph_compute_async(graph)
        np.testing.assert_allclose(await sched.tensor_get(graph.outputs[0]), want, rtol=1e-5)
        print(f"{sched.n_splits} splits, slot {sched.cur_copy} is next, {sched.buffer_size(second)} bytes on cpu:2")

    # A new device is debugged node by node.
    copy = await ap.graph_copy(graph, second)
    print(await ap.compare_backends(copy, host, second, lambda i, node, a, b, diff: diff < 1e-3, inputs=(x,)))
    await asyncio.gather(*(backend.aclose() for backend in (first, second, host)))


if __name__ == "__main__":
    asyncio.run(main())
