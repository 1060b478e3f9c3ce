// The server's interface: the one that any client of OpenAI's uses.

/** What the server says is wrong. */
export class ApiError extends Error {
  constructor(message, retryAfter) {
    super(message);
    this.retryAfter = retryAfter;
  }
}

/** The name of the model that writes texts: the first one. */
export async function modelName() {
  const answer = await fetch("v1/models");
  if (!answer.ok) throw new ApiError("The server did not say which models it has.", null);
  return (await answer.json()).data[0].id;
}

/**
 * Has a text written; yields its pieces as they come.
 *
 * @param {object} body of the request, without `stream`.
 * @param {AbortSignal} signal ends it.
 * @param {(usage: object, reason: string) => void} onend is called with what it cost and why it ended.
 */
export async function* stream(body, signal, onend = () => {}) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    const after = Number(answer.headers.get("Retry-After")) || null;
    throw new ApiError(told?.error?.message ?? `The server answered ${answer.status}.`, after);
  }
  let reason = null;
  for await (const found of events(answer.body)) {
    if (found.error) throw new ApiError(found.error.message, null);
    if (found.usage) onend(found.usage, reason);
    const choice = found.choices?.[0];
    reason = choice?.finish_reason ?? reason;
    if (choice?.delta?.content) yield choice.delta.content;
  }
}

/** The data of each event of a stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError("The connection was cut.", null);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
