// The form of a new clip, generated from what GET /models says that a model takes.

import { busily, h } from "./page.js";

const LABELS = {
  prompt: "Prompt",
  negative_prompt: "What it should not show",
  image: "Start image",
  width: "Width",
  height: "Height",
  num_frames: "Frames",
  fps: "Frame rate",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  seed: "Seed",
};
const UNITS = { width: "px", height: "px", fps: "fps" };
const FIRST = ["prompt", "image"];
const EXAMPLES = 4;

export class Compose {
  /** @param onSubmit called with the request; tells whether an earlier task answers it, rejects with a Problem. */
  constructor(form, onSubmit) {
    this.form = form;
    this.onSubmit = onSubmit;
    this.models = [];
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) form.requestSubmit();
    });
  }

  show(models) {
    this.models = models;
    this.#build(models.find((model) => model.default) ?? models[0]);
  }

  /** Fill the form with the parameters of a task. */
  fill(task) {
    const model = this.models.find((candidate) => candidate.name === task.model);
    if (model) this.#build(model);
    for (const [name, value] of Object.entries(task.parameters)) {
      const field = this.form.elements[name];
      if (field && field.type !== "file" && value !== null && !field.disabled) field.value = value;
    }
    this.form.elements.prompt.focus();
  }

  #build(model) {
    const kept = this.form.elements.prompt?.value ?? "";
    this.model = model;
    const { properties, required } = model.parameters;
    const names = Object.keys(properties);
    const rest = names.filter((name) => !FIRST.includes(name));
    this.submit = h("button", { type: "submit", class: "primary" }, "Generate");
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.known = h("p", { class: "hint", hidden: true },
      "You asked for exactly this before, so this is that task. For another clip, tick “A new clip” under Priority and delivery.");
    this.form.replaceChildren(
      this.models.length > 1 ? this.#models() : "",
      ...FIRST.filter((name) => names.includes(name)).map((name) => this.#field(name, properties[name], required)),
      this.#examples(),
      h("details", { class: "settings" },
        h("summary", {}, "Settings"),
        h("div", { class: "grid" }, rest.map((name) => this.#field(name, properties[name], required)))),
      h("details", { class: "settings" }, h("summary", {}, "Priority and delivery"), this.#delivery()),
      this.problem, this.known,
      h("div", { class: "row" }, this.submit, h("span", { class: "hint keys" }, h("kbd", {}, "Ctrl"), " ", h("kbd", {}, "Enter"))));
    this.form.elements.prompt.value = kept;
  }

  #models() {
    const options = this.models.map((model) =>
      h("option", { value: model.name, selected: model === this.model }, model.name));
    const select = h("select", { id: "field-model", name: "model", "aria-describedby": "hint-model" }, options);
    select.addEventListener("change", () => {
      this.#build(this.models.find((model) => model.name === select.value));
      this.form.elements.model.focus();
    });
    return h("div", { class: "field" },
      h("label", { for: "field-model" }, "Model"), select, h("p", { class: "hint", id: "hint-model" }, this.model.title));
  }

  #field(name, rule, required) {
    const id = `field-${name}`;
    const described = `hint-${name} error-${name}`;
    const common = { id, name, "aria-describedby": described, required: required.includes(name) };
    return h("div", { class: rule.type === "string" ? "field wide" : "field" },
      h("label", { for: id }, LABELS[name] ?? name, UNITS[name] ? h("span", { class: "muted" }, ` ${UNITS[name]}`) : null),
      this.#input(name, rule, common),
      h("p", { class: "hint", id: `hint-${name}` }, hint(name, rule)),
      h("p", { class: "error", id: `error-${name}`, hidden: true }));
  }

  #input(name, rule, common) {
    if (name === "image") return h("input", { ...common, type: "file", accept: "image/png,image/jpeg,image/webp" });
    if (rule.type === "string") {
      const rows = name === "prompt" ? "3" : "2";
      const area = h("textarea", { ...common, rows, maxlength: String(rule.maxLength) });
      area.value = rule.default ?? "";
      return area;
    }
    if (isFixed(rule)) return h("input", { ...common, value: String(rule.default), disabled: true });
    if (rule.enum) {
      return h("select", common,
        rule.enum.map((value) => h("option", { value: String(value), selected: value === rule.default }, String(value))));
    }
    return h("input", {
      ...common,
      type: "number",
      inputmode: rule.type === "integer" ? "numeric" : "decimal",
      min: String(rule.minimum),
      max: String(rule.maximum),
      step: rule.type === "integer" ? String(rule.multipleOf ?? 1) : "any",
      value: rule.default === undefined ? null : String(rule.default),
      placeholder: rule.default === undefined ? "automatic" : null,
    });
  }

  #examples() {
    const { examples, vocabulary } = this.model;
    if (!examples.length) return "";
    const use = (prompt) => {
      this.form.elements.prompt.value = prompt;
      this.form.elements.prompt.focus();
    };
    return h("div", { class: "chips", role: "group", "aria-label": "Example prompts" },
      examples.slice(0, EXAMPLES).map((prompt) => h("button", { type: "button", class: "chip", onclick: () => use(prompt) }, prompt)),
      vocabulary
        ? h("button", { type: "button", class: "chip dice", onclick: () => use(anyPrompt(vocabulary)) }, "Surprise me")
        : null);
  }

  #delivery() {
    return h("div", { class: "grid" },
      h("div", { class: "field" },
        h("label", { for: "field-priority" }, "Priority"),
        h("select", { id: "field-priority", name: "priority", "aria-describedby": "error-priority" },
          ["low", "normal", "high"].map((value) => h("option", { selected: value === "normal" }, value))),
        h("p", { class: "error", id: "error-priority", hidden: true })),
      h("div", { class: "field" },
        h("label", { for: "field-deadline_seconds" }, "Deadline ", h("span", { class: "muted" }, "s")),
        h("input", { id: "field-deadline_seconds", name: "deadline_seconds", type: "number", min: "1", step: "any",
          placeholder: "default", "aria-describedby": "error-deadline_seconds" }),
        h("p", { class: "error", id: "error-deadline_seconds", hidden: true })),
      h("div", { class: "field wide" },
        h("label", { for: "field-callback_url" }, "Callback URL"),
        h("input", { id: "field-callback_url", name: "callback_url", type: "url", placeholder: "https://…",
          "aria-describedby": "error-callback_url" }),
        h("p", { class: "error", id: "error-callback_url", hidden: true })),
      h("div", { class: "field wide" },
        h("label", { for: "field-labels" }, "Labels"),
        h("input", { id: "field-labels", name: "labels", placeholder: "separated by commas",
          "aria-describedby": "error-labels" }),
        h("p", { class: "error", id: "error-labels", hidden: true })),
      h("label", { class: "check wide" },
        h("input", { type: "checkbox", name: "regenerate" }), "A new clip even if I asked for the same before"));
  }

  async #submit() {
    this.#clearErrors();
    const replayed = await busily(
      this.submit, async () => this.onSubmit(await this.#request()), (problem) => this.#showErrors(problem));
    this.known.hidden = !replayed;
  }

  /** What differs from the defaults: the rest is the gateway's to fill in. */
  async #request() {
    const { elements } = this.form;
    const request = { prompt: elements.prompt.value };
    if (this.models.length > 1 && !this.model.default) request.model = this.model.name;
    for (const [name, rule] of Object.entries(this.model.parameters.properties)) {
      const field = elements[name];
      if (name === "prompt" || field.disabled) continue;
      if (name === "image") {
        if (field.files.length) request.image = await dataUrl(field.files[0]);
        continue;
      }
      if (field.value === "" || field.value === String(rule.default)) continue;
      request[name] = rule.type === "string" ? field.value : Number(field.value);
    }
    if (elements.priority.value !== "normal") request.priority = elements.priority.value;
    if (elements.deadline_seconds.value) request.deadline_seconds = Number(elements.deadline_seconds.value);
    if (elements.callback_url.value) request.callback_url = elements.callback_url.value;
    const labels = elements.labels.value.split(",").map((label) => label.trim()).filter(Boolean);
    if (labels.length) request.labels = labels;
    if (elements.regenerate.checked) request.regenerate = true;
    return request;
  }

  #clearErrors() {
    this.problem.hidden = true;
    this.known.hidden = true;
    for (const error of this.form.querySelectorAll(".field .error")) error.hidden = true;
    for (const field of this.form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  #showErrors(problem) {
    const unplaced = [];
    let first = null;
    for (const { field, message } of problem.errors ?? []) {
      const input = this.form.elements[field.split(".")[0]];
      const place = input && this.form.querySelector(`#error-${CSS.escape(input.name)}`);
      if (!place) {
        unplaced.push(`${field}: ${message}`);
        continue;
      }
      place.textContent = message;
      place.hidden = false;
      input.setAttribute("aria-invalid", "true");
      const folded = input.closest("details");
      if (folded) folded.open = true;
      first ??= input;
    }
    first?.focus();
    if (first && !unplaced.length) return;
    this.problem.replaceChildren(
      [problem.message, ...unplaced].join(" "),
      ...(problem.taskIds ?? []).flatMap((id) => [" ", h("a", { href: `#/tasks/${id}` }, id.slice(0, 8))]));
    this.problem.hidden = false;
  }
}

const isFixed = (rule) =>
  rule.enum?.length === 1 || (rule.minimum !== undefined && rule.minimum === rule.maximum);

function hint(name, rule) {
  if (name === "seed") return "The same seed makes the same clip";
  if (isFixed(rule)) return "Fixed for this model";
  if (rule.enum || rule.type === "string") return "";
  const step = rule.multipleOf > 1 ? `, multiples of ${rule.multipleOf}` : "";
  return `${rule.minimum} to ${rule.maximum}${step}`;
}

/** A prompt in the model's own words; size and background in every other one only. */
function anyPrompt({ sizes, colours, shapes, motions, backgrounds }) {
  const any = (words) => words[Math.floor(Math.random() * words.length)];
  const sometimes = (text) => (Math.random() < 0.5 ? text : "");
  const colour = any(colours);
  const text = [sometimes(any(sizes)), colour, any(shapes), any(motions)].filter(Boolean).join(" ");
  const background = any(backgrounds.filter((name) => name !== colour));
  return `${/^[aeiou]/.test(text) ? "an" : "a"} ${text} ${sometimes(`on a ${background} background`)}`.trim();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("The image cannot be read.")));
    reader.readAsDataURL(file);
  });
}
