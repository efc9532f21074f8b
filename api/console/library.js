// Lists beside the stage: the user's tasks, and who works for them.

import { ago, find, h, here, pill, redraw, seconds, table } from "./page.js";

const PAGE = 24;
const LAG = 1_200;
/** So long the list may lack what this page knows to be there. */
const MOST_LAG = 20_000;

/** The user's tasks. Lists lag behind by moments, so what this page knows better is put in. */
export class Library {
  constructor(gateway) {
    this.gateway = gateway;
    this.items = new Map();
    this.known = new Map();
    this.cursor = null;
    this.batch = null;
    find("filter").onchange = () => this.refresh();
    find("more").onclick = () => this.#load(this.cursor);
  }

  /** Mark the task that is open. */
  choose(taskId) {
    this.chosen = taskId;
    this.#draw();
  }

  /** List the tasks of one batch, or all with null. */
  only(batchId) {
    this.batch = batchId;
    return this.refresh();
  }

  /** A task as it is now. */
  put(task) {
    this.known.set(task.task_id, { task, at: Date.now() });
    if (this.items.has(task.task_id) || this.#fits(task)) this.items.set(task.task_id, task);
    this.#draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh().catch(() => {}), LAG);
  }

  get hasOpen() {
    return [...this.items.values()].some((task) => !task.is_terminal);
  }

  refresh() {
    return this.#load(null);
  }

  async #load(cursor) {
    const query = new URLSearchParams({ limit: String(PAGE) });
    const status = find("filter").value;
    if (status) query.set("status", status);
    if (this.batch) query.set("batch_id", this.batch);
    if (cursor) query.set("cursor", cursor);
    const page = await this.gateway.get(`/tasks?${query}`);
    if (!cursor) this.items.clear();
    for (const task of page.items) {
      const known = this.known.get(task.task_id)?.task;
      this.items.set(task.task_id, known && known.updated_at > task.updated_at ? known : task);
    }
    for (const { task, at } of this.known.values()) {
      if (Date.now() - at < MOST_LAG && this.#fits(task) && !this.items.has(task.task_id)) this.items.set(task.task_id, task);
    }
    this.cursor = page.next_cursor;
    this.#draw();
  }

  #fits(task) {
    const wanted = find("filter").value;
    return (!wanted || wanted === task.status) && (!this.batch || this.batch === task.batch_id);
  }

  #draw() {
    const newestFirst = [...this.items.values()].sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
    const focused = document.activeElement?.closest("#tasks a")?.getAttribute("href");
    redraw(find("tasks"), newestFirst.map((task) => card(task, task.task_id === this.chosen)));
    if (focused) find("tasks").querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    find("library-title").textContent = this.batch ? `Tasks of ${this.batch.slice(0, 9)}` : "Your tasks";
    find("no-tasks").textContent = this.batch || find("filter").value
      ? "No task fits." : "Nothing here yet. Describe a clip and press Generate.";
    find("no-tasks").hidden = this.items.size > 0;
    find("more").hidden = !this.cursor;
  }
}

function card(task, chosen) {
  const picture = task.poster_url
    ? h("img", { src: here(task.poster_url), alt: "", loading: "lazy", width: 96, height: 96 })
    : h("span", { class: `thumb ${task.status.toLowerCase()}`, "aria-hidden": "true" });
  return h("li", {},
    h("a", { href: `#/tasks/${task.task_id}`, class: "task", "aria-current": chosen ? "true" : null },
      picture,
      h("span", { class: "about" },
        h("span", { class: "prompt" }, task.parameters.prompt),
        h("span", { class: "meta" }, pill(task.status, task.is_terminal), h("time", { datetime: task.created_at }, ago(task.created_at))))));
}

/** Queues and workers, where this gateway and key offer them; else what the catalogue says. */
export async function drawFleet(gateway, models) {
  const [queues, workers] = await Promise.all([
    gateway.offered("/queues").catch(() => null),
    gateway.offered("/workers").catch(() => null),
  ]);
  const pools = poolsOf(models);
  redraw(find("pools"), pools.map((pool) =>
    h("span", { class: `pool ${pool.state}` }, `${pool.pool}: ${pool.state === "live" ? `${pool.slots} ${pool.slots === 1 ? "slot" : "slots"}` : pool.state === "no_worker" ? "no worker" : "unknown"}`)));
  redraw(find("fleet-body"), [
    queues?.items?.length ? queueTable(queues.items) : poolTable(pools),
    ...(workers?.items?.length ? [workerTable(workers.items)] : []),
  ]);
}

function poolsOf(models) {
  return [...new Map(models.map((model) => [model.serving.pool, model.serving])).values()];
}

function poolTable(pools) {
  return table("GPU pools", ["Pool", "Workers", "Slots"],
    pools.map((pool) => [pool.pool, text(pool.workers), text(pool.slots)]));
}

function queueTable(items) {
  return table("Queues", ["Pool", "Waiting", "Oldest", "In /min", "Out /min", "Drained in", "Slots"],
    items.map((item) => [
      item.pool, text(item.backlog), seconds(item.backlog_age_seconds), perMinute(item.arrival_rate),
      perMinute(item.completion_rate), seconds(item.drain_seconds), text(item.live_slots),
    ]));
}

function workerTable(items) {
  return table("Workers", ["Queue", "Worker", "State", "Busy", "Task"],
    items.map((item) => [
      item.task_queue, item.identity.split(" health ")[0], item.status.replaceAll("_", " "),
      `${item.slots_used} of ${item.slots_used + item.slots_free}`,
      item.tasks.length ? item.tasks.map((id) => h("a", { href: `#/tasks/${id}`, class: "id" }, id.slice(0, 9))) : null,
    ]));
}

const text = (value) => (value === null || value === undefined ? null : String(value));
const perMinute = (rate) => (rate === null || rate === undefined ? null : (rate * 60).toFixed(1));
