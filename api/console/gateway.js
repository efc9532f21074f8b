// The gateway as the page sees it: JSON calls, and event streams read with fetch(), because EventSource sends no key.

const BASE = new URL("api/v1", document.baseURI).href;
const SLOWEST_RETRY = 15_000;

/** An answer that is no success: RFC 9457 problem details where the gateway gave some. */
export class Problem extends Error {
  constructor(status, details = {}) {
    super(details.detail || details.title || `The gateway answered ${status}.`);
    this.status = status;
    this.code = details.code ?? null;
    this.errors = details.errors ?? [];
    this.taskIds = details.task_ids ?? [];
  }
}

export class Gateway {
  /** @param onRejected called when the key is not (or no longer) good. */
  constructor(key, endUser, onRejected) {
    this.headers = { Authorization: `Bearer ${key}`, ...(endUser ? { "X-User-Id": endUser } : {}) };
    this.onRejected = onRejected;
    this.absent = new Set();
  }

  get = async (path) => (await this.#call("GET", path)).body;
  post = async (path, body) => (await this.#call("POST", path, body ?? {})).body;

  /** Submit a request: the task, and whether it is one that was there before. */
  async submit(request) {
    const { body, headers } = await this.#call("POST", "/tasks", request);
    return { task: body, replayed: headers.get("Idempotency-Replayed") === "true" };
  }

  /** Like `get`, but null where the gateway does not offer it, or not to this key; then it is not asked again. */
  async offered(path) {
    if (this.absent.has(path)) return null;
    try {
      return await this.get(path);
    } catch (problem) {
      if (![403, 404, 405].includes(problem.status)) throw problem;
      this.absent.add(path);
      return null;
    }
  }

  /**
   * Follow a task until its run is closed; comes back by itself where a connection broke off.
   * @param on {state(data), progress(data), lost(), found()}
   * @param signal ends it.
   */
  async watch(taskId, on, signal) {
    let last = null;
    let pause = 2_000;
    let failures = 0;
    while (!signal.aborted) {
      try {
        const reply = await fetch(`${BASE}/tasks/${taskId}/events`, {
          headers: { ...this.headers, Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) },
          signal,
          cache: "no-store",
        });
        if (reply.status === 204) return;
        if (!reply.ok) throw await this.#problem(reply);
        if (failures) on.found?.();
        failures = 0;
        for await (const event of eventsOf(reply.body)) {
          if (event.retry) pause = event.retry;
          if (!event.data) continue;
          last = event.id;
          const data = JSON.parse(event.data);
          on[event.event]?.(data);
          if (event.event === "state" && data.is_terminal) return;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Problem && error.status < 500 && error.status !== 429) throw error;
      }
      failures += 1;
      if (failures > 1) on.lost?.();
      await new Promise((resolve) => setTimeout(resolve, Math.min(pause * failures, SLOWEST_RETRY)));
    }
  }

  async #call(method, path, body) {
    let reply;
    try {
      reply = await fetch(BASE + path, {
        method,
        headers: { ...this.headers, ...(body ? { "Content-Type": "application/json" } : {}) },
        body: body ? JSON.stringify(body) : undefined,
      });
    } catch {
      throw new Problem(0, { detail: "The gateway does not answer. Is it running?" });
    }
    if (!reply.ok) throw await this.#problem(reply);
    return { body: reply.status === 204 ? null : await reply.json(), headers: reply.headers };
  }

  async #problem(reply) {
    const problem = new Problem(reply.status, await reply.json().catch(() => ({})));
    if (reply.status === 401) this.onRejected(problem);
    return problem;
  }
}

/** Events of a text/event-stream body; comments are left out. */
export async function* eventsOf(body) {
  let rest = "";
  let event = {};
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (Object.keys(event).length) yield event;
          event = {};
        } else if (!line.startsWith(":")) {
          const [name, text] = split(line);
          event[name] = name === "retry" ? Number(text) : name === "data" && event.data ? `${event.data}\n${text}` : text;
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function split(line) {
  const at = line.indexOf(":");
  return at < 0 ? [line, ""] : [line.slice(0, at), line.slice(at + 1).replace(/^ /, "")];
}
