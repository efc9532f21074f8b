// The user's newest batches: how far they are, their tasks, and stopping the rest.

import { announce, busily, find, h, pill, redraw } from "./page.js";

const NEWEST = 5;
const SOON = 1_000;
const ENDED = ["SUCCEEDED", "FAILED", "TIMEOUT", "CANCELED"];

export class Batches {
  /** @param onChoose called with the id of a batch whose tasks are to be listed, or null for all tasks. */
  constructor(gateway, onChoose) {
    this.gateway = gateway;
    this.onChoose = onChoose;
    this.items = [];
    this.chosen = null;
    this.problem = "";
    this.#draw();
  }

  get hasOpen() {
    return this.items.some((batch) => !batch.is_terminal);
  }

  async refresh() {
    this.items = (await this.gateway.get(`/batches?limit=${NEWEST}`)).items;
    this.#draw();
  }

  #draw() {
    const place = find("batch-list");
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
    find("batches").hidden = this.items.length === 0;
    redraw(place, this.items.map((batch) => this.#row(batch)));
    find("batch-problem").textContent = this.problem;
    find("batch-problem").hidden = !this.problem;
    if (focused) place.querySelector(`[data-keep="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  #row(batch) {
    const all = Object.values(batch.counts).reduce((sum, count) => sum + count, 0);
    const done = ENDED.reduce((sum, state) => sum + batch.counts[state], 0);
    const without = done - batch.counts.SUCCEEDED;
    const told = [`${done} of ${all} ended`, without ? `${without} without a clip` : null].filter(Boolean).join(", ");
    const chosen = batch.batch_id === this.chosen;
    const shown = this.#button(batch, "tasks", chosen ? "All tasks" : "Show tasks", () => this.#choose(chosen ? null : batch.batch_id));
    shown.setAttribute("aria-pressed", String(chosen));
    return h("li", { class: "batch" },
      h("div", { class: "meta" }, h("code", {}, batch.batch_id.slice(0, 9)), pill(batch.status)),
      h("progress", { max: Math.max(1, all), value: done, "aria-label": `Progress of batch ${batch.batch_id.slice(0, 9)}` }),
      h("p", { class: "hint" }, told),
      h("div", { class: "actions" },
        shown,
        batch.is_terminal || batch.cancel_requested ? null : this.#button(batch, "cancel", "Cancel rest", () => this.#cancel(batch, "soft")),
        batch.is_terminal || batch.cancel_requested === "hard" ? null
          : this.#button(batch, "stop", "Stop now", () => this.#cancel(batch, "hard"), "danger")));
  }

  #button(batch, what, label, work, kind = "") {
    const button = h("button", {
      type: "button", class: `small ${kind}`, "data-keep": `${batch.batch_id} ${what}`,
      "aria-label": `${label}, batch ${batch.batch_id.slice(0, 9)}`,
    }, label);
    button.addEventListener("click", () => busily(button, work, (problem) => {
      this.problem = problem.message;
      this.#draw();
    }));
    return button;
  }

  async #choose(batchId) {
    this.chosen = batchId;
    this.#draw();
    await this.onChoose(batchId);
  }

  async #cancel(batch, mode) {
    this.problem = "";
    const canceled = await this.gateway.post(`/batches/${batch.batch_id}/cancel`, { mode });
    this.items = this.items.map((item) => (item.batch_id === canceled.batch_id ? canceled : item));
    announce(mode === "hard" ? "The batch is being stopped" : "The rest of the batch is canceled");
    this.#draw();
    setTimeout(() => this.refresh().catch(() => {}), SOON);
  }
}
