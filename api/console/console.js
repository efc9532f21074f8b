// The console: key, form, stage, lists. State is the address (`#/tasks/<id>`) and the key of this tab.

import { Batches } from "./batches.js";
import { Compose } from "./compose.js";
import { Gateway } from "./gateway.js";
import { Library, drawFleet } from "./library.js";
import { announce, busily, find } from "./page.js";
import { Stage } from "./task.js";

const KEY = "reelgate.key";
const END_USER = "reelgate.end-user";
const FLEET_EVERY = 10_000;
const LIST_EVERY = 5_000;

class Console {
  constructor(gateway, models) {
    this.gateway = gateway;
    this.models = models;
    this.library = new Library(gateway);
    this.batches = new Batches(gateway, (batchId) => this.library.only(batchId));
    this.compose = new Compose(find("compose"), (request) => this.#submit(request));
    this.stage = new Stage(find("stage"), gateway, {
      again: (task) => this.compose.fill(task),
      opened: (task) => this.#open(task),
      changed: (task) => this.#changed(task),
    });
    this.compose.show(models);
  }

  start() {
    this.timers = [
      setInterval(() => this.#whenSeen(() => this.#fleet()), FLEET_EVERY),
      setInterval(() => this.#whenSeen(() => this.library.hasOpen && this.library.refresh()), LIST_EVERY),
      setInterval(() => this.#whenSeen(() => this.batches.hasOpen && this.#batch()), LIST_EVERY),
    ];
    this.follow = () => this.#route(true);
    addEventListener("hashchange", this.follow);
    this.#fleet();
    this.library.refresh().catch((problem) => announce(problem.message));
    this.#route(false);
  }

  stop() {
    this.timers.forEach(clearInterval);
    removeEventListener("hashchange", this.follow);
    this.stage.empty();
  }

  async #submit(request) {
    const { task, replayed } = await this.gateway.submit(request);
    announce(replayed ? "You asked for this before; here it is" : "The task is accepted");
    this.#open(task);
    return replayed;
  }

  #open(task) {
    this.library.put(task);
    this.fresh = task;
    const address = `#/tasks/${task.task_id}`;
    if (location.hash === address) this.#route(false);
    else location.hash = address;
  }

  #changed(task) {
    this.library.put(task);
    const link = find("web-ui");
    link.href = new URL(task.links.web_ui).origin;
    link.hidden = false;
  }

  #route(moved) {
    const match = /^#\/tasks\/([a-z0-9]+)$/.exec(location.hash);
    const taskId = match?.[1] ?? null;
    this.library.choose(taskId);
    const known = this.fresh?.task_id === taskId ? this.fresh : null;
    this.fresh = null;
    if (!taskId) {
      this.stage.empty();
      return;
    }
    this.stage.open(taskId, known);
    if (moved) {
      const smooth = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
      find("stage").scrollIntoView({ behavior: smooth, block: "nearest" });
      // Who submits stays in the form; who follows a link goes to the task.
      if (!known) find("stage").focus({ preventScroll: true });
    }
  }

  /** Batches as they are; the tasks that they have started meanwhile belong on the list. */
  async #batch() {
    await Promise.all([this.batches.refresh(), this.library.refresh()]);
  }

  async #fleet() {
    try {
      this.models = (await this.gateway.get("/models")).items;
      await drawFleet(this.gateway, this.models);
      // They are posted elsewhere, so new ones are looked for from time to time.
      await this.batches.refresh();
    } catch {
      // The next look may succeed; the stage says when the gateway is gone.
    }
  }

  #whenSeen(work) {
    if (document.visibilityState === "visible") Promise.resolve(work()).catch(() => {});
  }
}

let open = null;

function ask(message = "") {
  open?.stop();
  open = null;
  sessionStorage.removeItem(KEY);
  find("studio").hidden = true;
  find("forget").hidden = true;
  find("gate").hidden = false;
  find("key-error").textContent = message;
  find("key-error").hidden = !message;
  find("key").focus();
}

async function enter(key, endUser) {
  const gateway = new Gateway(key, endUser, (problem) => ask(problem.message));
  const models = (await gateway.get("/models")).items;
  // A service key without an end user may see the models, but has no tasks.
  await gateway.get("/tasks?limit=1");
  sessionStorage.setItem(KEY, key);
  sessionStorage.setItem(END_USER, endUser);
  find("gate").hidden = true;
  find("studio").hidden = false;
  find("forget").hidden = false;
  open = new Console(gateway, models);
  open.start();
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const [key, endUser] = [find("key").value.trim(), find("end-user").value.trim()];
  find("key").value = "";
  busily(event.submitter ?? find("key-form").querySelector("button"), () => enter(key, endUser), (problem) => {
    ask(problem.message);
    find("key").value = key;
  });
});
find("forget").addEventListener("click", () => {
  sessionStorage.removeItem(END_USER);
  ask();
});

const kept = sessionStorage.getItem(KEY);
if (kept) enter(kept, sessionStorage.getItem(END_USER) ?? "").catch((problem) => ask(problem.message));
else ask();
