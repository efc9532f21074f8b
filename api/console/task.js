// One task on the stage: state and progress as they come, the clip, what can be done, what happened when.

import { Problem } from "./gateway.js";
import { ago, announce, busily, bytes, clock, h, here, pill, redraw, seconds, table } from "./page.js";

const PHASES = {
  load: "Loading the model",
  encode_prompt: "Reading the prompt",
  step: "Denoising",
  decode: "Decoding frames",
  encode_video: "Encoding the video",
  store: "Storing the clip",
};
const AGAIN = ["FAILED", "TIMEOUT", "CANCELED"];
const DELIVERING = 3_000;

export class Stage {
  /** @param on {again(task), opened(taskId), changed(task)} */
  constructor(place, gateway, on) {
    this.place = place;
    this.gateway = gateway;
    this.on = on;
    this.empty();
  }

  empty() {
    this.#leave();
    this.place.replaceChildren(
      h("div", { class: "screen idle" }, h("p", {}, "Your clip plays here.")),
      h("h2", { id: "stage-title", class: "unseen" }, "No task is open"));
  }

  /** Open a task and follow it. `task` is shown at once where it is known. */
  async open(taskId, task = null) {
    this.#leave();
    const leaving = new AbortController();
    this.leaving = leaving;
    this.states = [];
    this.announced = null;
    this.shows = null;
    this.offers = null;
    this.#build();
    try {
      this.#show(task ?? (await this.gateway.get(`/tasks/${taskId}`)));
      await this.gateway.watch(taskId, {
        state: (event) => this.#state(event, leaving.signal),
        progress: (event) => this.#progress(event),
        lost: () => this.#note("The connection is lost; trying again."),
        found: () => this.#note(""),
      }, leaving.signal);
    } catch (problem) {
      if (!leaving.signal.aborted) this.#note(problem.message);
    }
  }

  #leave() {
    this.leaving?.abort();
    clearTimeout(this.callbackTimer);
    this.task = null;
  }

  #build() {
    this.screen = h("div", { class: "screen" });
    this.status = h("span", {});
    this.title = h("h2", { id: "stage-title" });
    this.bar = h("progress", { max: 100, value: 0, "aria-label": "Progress of the generation" });
    this.doing = h("p", { class: "doing" });
    this.note = h("p", { class: "error", role: "alert", hidden: true });
    this.warnings = h("p", { class: "hint warnings" });
    this.actions = h("div", { class: "actions" });
    this.choice = h("p", { class: "hint", id: "stage-choice" },
      "Cancel lets a clip that was begun finish, and keeps it. Stop now frees the GPU within a step and keeps nothing.");
    this.moving = h("div", { class: "moving" }, this.bar, this.doing);
    this.facts = h("dl", { class: "facts" });
    this.timeline = h("ol", { class: "timeline" });
    this.attempts = h("div", {});
    this.callback = h("div", {});
    this.place.replaceChildren(
      this.screen,
      h("div", { class: "headline" }, this.title, this.status),
      this.warnings, this.moving, this.note, this.actions, this.choice,
      h("details", { class: "more", open: true }, h("summary", {}, "What happened when"), this.timeline, this.attempts),
      this.callback,
      h("details", { class: "more" }, h("summary", {}, "Details"), this.facts));
  }

  #note(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  async #state(event, signal) {
    this.states.push(event);
    this.#drawTimeline();
    // The record behind the state: times, result, error, callback.
    const task = await this.gateway.get(`/tasks/${event.task_id}`).catch(() => null);
    if (task && !signal.aborted) this.#show(task);
  }

  #progress(event) {
    const { progress, queue } = event;
    const waiting = queue
      ? [queue.position === null ? "Waiting for a GPU" : `Number ${queue.position + 1} in the queue`,
        queue.live_slots === 0 ? "no worker is there yet" : null,
        queue.estimated_start_seconds === null ? null : `starts in about ${seconds(queue.estimated_start_seconds)}`]
      : [];
    const running = progress
      ? [PHASES[progress.phase] ?? progress.phase,
        progress.phase === "step" && progress.total_steps ? `step ${progress.step} of ${progress.total_steps}` : null,
        progress.eta_seconds === null ? null : `about ${seconds(progress.eta_seconds)} left`]
      : ["Starting on a worker"];
    const parts = (queue ? waiting : running).filter(Boolean);
    if (event.cancel_requested === "hard") parts.unshift("Stopping");
    this.doing.textContent = parts.join(" · ");
    if (progress) this.bar.value = progress.percent;
    else this.bar.removeAttribute("value");
    if (this.percent) this.percent.textContent = progress ? `${Math.round(progress.percent)} %` : "";
    this.bar.setAttribute("aria-valuetext", this.doing.textContent);
    // Every quarter is enough to hear.
    const heard = progress ? `${PHASES[progress.phase]}, ${Math.floor(progress.percent / 25) * 25} percent` : parts[0];
    if (heard !== this.announced) announce(heard);
    this.announced = heard;
  }

  #show(task) {
    const before = this.task;
    this.task = task;
    this.title.textContent = task.parameters.prompt;
    this.status.replaceChildren(pill(task.status, task.is_terminal));
    // A task out of the list carries none.
    if (task.warnings) this.warnings.textContent = task.warnings.map((warning) => warning.message).join(" ");
    this.moving.hidden = task.is_terminal;
    if (before?.status !== task.status || before?.is_terminal !== task.is_terminal) {
      announce(`Task ${task.status.toLowerCase()}`);
      this.on.changed(task);
    }
    this.screen.className = `screen ${task.status.toLowerCase()}${task.is_terminal ? "" : " open"}`;
    const shows = task.result_url ?? [task.status, task.is_terminal].join();
    if (shows !== this.shows) this.#drawScreen();
    this.shows = shows;
    if (!task.is_terminal) this.#progress(task);
    this.#drawActions();
    this.#drawFacts();
    this.#drawTimeline();
    if (task.is_terminal) {
      this.#drawAttempts();
      this.#drawCallback();
    }
  }

  #drawScreen() {
    const { task } = this;
    const { width, height } = task.result ?? task.parameters;
    this.percent = null;
    if (task.result_url) {
      const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      this.screen.replaceChildren(h("video", {
        src: here(task.result_url), poster: task.poster_url ? here(task.poster_url) : null, width, height,
        controls: true, loop: true, muted: true, autoplay: !still, playsInline: true, preload: "auto",
        "aria-label": `Clip: ${task.parameters.prompt}`,
      }));
      return;
    }
    if (task.is_terminal) {
      this.screen.replaceChildren(
        h("p", {}, task.error_message ?? "No clip.", task.error_code ? h("code", {}, task.error_code) : null));
      return;
    }
    // The bar below says the same to those who cannot see it.
    this.percent = h("span", { class: "percent", "aria-hidden": "true" });
    this.screen.replaceChildren(h("p", {}, this.percent, `${width} × ${height} · ${task.parameters.num_frames} frames`));
  }

  #drawActions() {
    const { task } = this;
    const offers = [task.status, task.is_terminal, task.cancel_requested, task.result_url].join();
    if (offers === this.offers) return;
    this.offers = offers;
    const open = !task.is_terminal;
    const buttons = [];
    if (open && task.cancel_requested === null) {
      buttons.push(this.#button("Cancel", "stage-choice", () => this.#cancel("soft")));
    }
    if (open && task.cancel_requested !== "hard") {
      buttons.push(this.#button("Stop now", "stage-choice", () => this.#cancel("hard"), "danger"));
    }
    if (task.is_terminal && AGAIN.includes(task.status)) {
      buttons.push(this.#button("Retry", null, () => this.#retry(), "primary"));
    }
    if (task.result_url) {
      buttons.push(h("a", { class: "button", href: here(task.result_url), download: `${task.task_id}.mp4` }, "Download"));
    }
    buttons.push(this.#button("Use these settings", null, async () => this.on.again(task), "quiet"));
    buttons.push(h("a", { class: "button quiet", href: task.links.web_ui, target: "_blank", rel: "noreferrer" }, "Temporal ↗"));
    // Who is at a button stays there, and if it is gone now here, and not at the top of the page.
    const at = this.actions.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.actions.replaceChildren(...buttons);
    if (at) (buttons.find((button) => button.textContent === at) ?? this.place).focus({ preventScroll: true });
    this.choice.hidden = !open || task.cancel_requested !== null;
  }

  #button(label, describedBy, work, kind = "") {
    const button = h("button", { type: "button", class: kind, "aria-describedby": describedBy }, label);
    button.addEventListener("click", () => busily(button, work, (problem) => this.#note(problem.message)));
    return button;
  }

  async #cancel(mode) {
    this.#note("");
    this.#show(await this.gateway.post(`/tasks/${this.task.task_id}/cancel`, { mode }));
  }

  async #retry() {
    const { task_id: taskId } = this.task;
    try {
      this.on.opened(await this.gateway.post(`/tasks/${taskId}/retry`));
    } catch (problem) {
      if (!(problem instanceof Problem) || problem.code !== "NOT_FOUND") throw problem;
      throw new Error("This gateway offers no retry. Use these settings instead.", { cause: problem });
    }
  }

  #drawFacts() {
    const { task } = this;
    const p = task.parameters;
    const rows = [
      ["Task", h("code", {}, task.task_id)],
      ["Model", task.model],
      ["Clip", `${p.width} × ${p.height}, ${p.num_frames} frames at ${p.fps} fps`],
      ["Steps, guidance", `${p.num_inference_steps}, ${p.guidance_scale}`],
      ["Seed", String(p.seed)],
      ["Not to show", p.negative_prompt],
      ["Priority", task.priority],
      ["Labels", task.labels.join(", ")],
      ["Worker", task.worker_id],
      ["Attempts", task.attempt ? String(task.attempt) : null],
      ["GPU time", task.gpu_seconds ? seconds(task.gpu_seconds) : null],
      ["File", task.result ? `${bytes(task.result.bytes)}, kept until ${new Date(task.result.expires_at).toLocaleDateString()}` : null],
      ["SHA-256", task.result ? h("code", {}, task.result.sha256) : null],
      ["Retry of", task.retry_of ? h("a", { href: `#/tasks/${task.retry_of}` }, h("code", {}, task.retry_of)) : null],
      ["Accepted", `${clock(task.created_at)}, ${ago(task.created_at)}`],
    ];
    redraw(this.facts, rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  /** States as the stream tells them: every one, however short. */
  #drawTimeline() {
    const steps = this.states.filter((state, number) => !state.is_terminal || this.states[number - 1]?.status !== state.status);
    redraw(this.timeline, steps.map((state, number) => {
      const next = steps[number + 1];
      const spent = next ? (new Date(next.at) - new Date(state.at)) / 1000 : null;
      return h("li", { class: state.status.toLowerCase() },
        h("span", { class: "what" }, state.status.charAt(0) + state.status.slice(1).toLowerCase()),
        h("time", { datetime: state.at }, clock(state.at)),
        h("span", { class: "muted" }, spent === null ? (state.error_code ?? "") : `for ${seconds(spent)}`));
    }));
  }

  async #drawAttempts() {
    const { task_id: taskId } = this.task;
    const timeline = await this.gateway.offered(`/tasks/${taskId}/timeline`).catch(() => null);
    if (this.task?.task_id !== taskId || !timeline?.attempts?.length) return;
    redraw(this.attempts, [table("Attempts", ["Attempt", "Worker", "Started", "Took", "Outcome"],
      timeline.attempts.map((attempt) => [
        String(attempt.number), attempt.worker_id, clock(attempt.started_at),
        attempt.started_at && attempt.ended_at ? seconds((new Date(attempt.ended_at) - new Date(attempt.started_at)) / 1000) : null,
        attempt.reason ?? attempt.state,
      ]))]);
  }

  async #drawCallback() {
    const { task_id: taskId, callback_status: status } = this.task;
    if (!status) return;
    const callback = await this.gateway.offered(`/tasks/${taskId}/callback`).catch(() => null);
    if (this.task?.task_id !== taskId || !callback) return;
    const again = this.#button("Deliver again", null, async () => {
      await this.gateway.post(`/tasks/${taskId}/callback/redeliver`);
      announce("The callback is delivered again");
      this.callbackTimer = setTimeout(() => this.#drawCallback(), 500);
    }, "quiet");
    const newest = callback.redeliveries.at(-1) ?? callback;
    const open = this.callback.querySelector("details")?.open ?? newest.status !== "SUCCEEDED";
    const pressed = this.callback.contains(document.activeElement);
    const bodyOpen = this.callback.querySelector("details details")?.open ?? false;
    this.callback.replaceChildren(h("details", { class: "more", open },
      h("summary", {}, "Callback ", pill(newest.status)),
      h("p", { class: "muted url" }, callback.url),
      callback.next_attempt_at ? h("p", {}, `Next attempt at ${clock(callback.next_attempt_at)}`) : null,
      callback.attempts.length ? attemptTable("Delivery attempts", callback.attempts) : null,
      callback.redeliveries.map((later) => [
        h("p", {}, `Redelivery ${later.number} `, pill(later.status)),
        later.attempts.length ? attemptTable(`Attempts of redelivery ${later.number}`, later.attempts) : null,
      ]).flat(),
      callback.body ? h("details", { open: bodyOpen }, h("summary", {}, "Body"), h("pre", { tabindex: "0" }, callback.body)) : null,
      h("div", { class: "actions" }, again)));
    if (pressed) again.focus({ preventScroll: true });
    if (["PENDING", "RETRYING"].includes(newest.status)) {
      clearTimeout(this.callbackTimer);
      this.callbackTimer = setTimeout(() => this.#drawCallback(), DELIVERING);
    }
  }
}

function attemptTable(caption, attempts) {
  return table(caption, ["Attempt", "At", "Took", "Answer"],
    attempts.map((attempt) => [
      String(attempt.number), clock(attempt.started_at), `${attempt.duration_ms} ms`,
      [attempt.status_code, attempt.error_code].filter(Boolean).join(" "),
    ]));
}
