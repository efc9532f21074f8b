// Small tools for building the page. Text always goes in as text, never as markup.

/** An element: `h("p", {class: "muted", onclick}, "text", child, null)`. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Show children in a place. What looks as before stays the element that it is: a click counts only on an element that is
 * there from press to release, and one that is drawn anew under the pointer would swallow it.
 */
export function redraw(place, children) {
  children.forEach((child, number) => {
    const old = place.childNodes[number];
    if (!old) place.append(child);
    else if (old.isEqualNode(child)) return;
    else if (old.cloneNode(false).isEqualNode(child.cloneNode(false))) redraw(old, [...child.childNodes]);
    else old.replaceWith(child);
  });
  while (place.childNodes.length > children.length) place.lastChild.remove();
}

export const find = (id) => document.getElementById(id);

/** Tell people who cannot see the page change. */
export function announce(text) {
  find("live").textContent = text;
}

export function pill(status, isTerminal = true) {
  const open = status === "CANCELED" && !isTerminal ? " (finishing)" : "";
  return h("span", { class: `pill ${status.toLowerCase()}` }, status.charAt(0) + status.slice(1).toLowerCase() + open);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

export function clock(time) {
  return time ? new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "–";
}

export function ago(time) {
  const passed = (Date.now() - new Date(time)) / 1000;
  if (passed < 45) return "just now";
  if (passed < 5400) return `${Math.max(1, Math.round(passed / 60))} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(time).toLocaleDateString();
}

export function bytes(size) {
  return size < 1_000_000 ? `${Math.max(1, Math.round(size / 1000))} KB` : `${(size / 1_000_000).toFixed(1)} MB`;
}

/** Links of the API carry its public name; the page uses the one it was opened under. */
export function here(url) {
  const parts = new URL(url);
  return parts.pathname + parts.search;
}

/** Run `work` once however often its button is pressed meanwhile, and show what went wrong beside it. */
export async function busily(button, work, onProblem) {
  if (button.ariaBusy === "true") return undefined;
  // Not `disabled`: that would take the focus from who pressed it.
  button.ariaBusy = button.ariaDisabled = "true";
  try {
    return await work();
  } catch (problem) {
    onProblem(problem);
    return undefined;
  } finally {
    button.ariaBusy = button.ariaDisabled = null;
  }
}

export function table(caption, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell ?? "–")))))));
}
