"use strict";
// Sorting: a click sorts, a second click turns the order round; empty cells stay at the end either way.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    // Of numbers the large ones are what one looks for first, of names the early ones.
    const down = before ? before === "ascending" : numeric;
    const key = (row) => {
      const cell = row.cells[column];
      const text = cell.dataset.key ?? (cell.querySelector(".none") ? "" : cell.textContent);
      return text === "" ? null : numeric ? Number(text) : text;
    };
    const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : compare(a, b) * (down ? -1 : 1)));
    body.append(...rows.map(([, row]) => row));
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }));
}

// Legends show and hide what carries their name in the same section.
for (const button of document.querySelectorAll("[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    for (const one of button.closest("section").querySelectorAll("g[data-s]")) {
      if (one.dataset.s === button.dataset.toggle) one.classList.toggle("off", !on);
    }
  });
}

// Reading a line: the nearest drawn point, turned back into numbers by the scales that the chart carries.
const tip = document.getElementById("tip");
const scale = (text) => {
  const [low, high, start, end, kind] = text.split(" ").map((word, i) => (i < 4 ? Number(word) : word));
  return (at) => {
    const share = (at - start) / (end - start);
    return kind === "log" ? low * (high / low) ** share : low + share * (high - low);
  };
};
const brief = (value) => {
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
};
for (const svg of document.querySelectorAll("svg.lines")) {
  const [x, y] = [scale(svg.dataset.x), scale(svg.dataset.y)];
  const lines = [...svg.querySelectorAll("g[data-label]")].map((line) => {
    const found = line.querySelector(".line").getAttribute("d").matchAll(/[ML]([-\d.]+),([-\d.]+)/g);
    return [line, [...found].map(([, a, b]) => [Number(a), Number(b)])];
  });
  const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  ring.setAttribute("r", "4");
  ring.setAttribute("class", "ring");
  const leave = () => {
    tip.hidden = true;
    ring.remove();
    svg.classList.remove("reading");
    svg.querySelectorAll(".read").forEach((line) => line.classList.remove("read"));
  };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const unit = svg.viewBox.baseVal.width / box.width;
    const here = [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
    let best = null;
    for (const [line, points] of lines) {
      if (line.classList.contains("off")) continue;
      for (const point of points) {
        const far = Math.hypot(point[0] - here[0], point[1] - here[1]);
        if (far < 40 && (!best || far < best.far)) best = { far, line, point };
      }
    }
    leave();
    if (!best) return;
    const { line, point } = best;
    svg.classList.add("reading");
    line.classList.add("read");
    ring.setAttribute("cx", point[0]);
    ring.setAttribute("cy", point[1]);
    line.append(ring);
    tip.textContent = `${line.dataset.label}: ${brief(y(point[1]))} at ${svg.dataset.xName} ${brief(x(point[0]))}`;
    tip.hidden = false;
    const left = box.left + point[0] / unit + 12;
    tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, box.top + point[1] / unit - tip.offsetHeight - 10)}px`;
  });
}

// A link to a run opens its details.
const open = () => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") target.open = true;
};
addEventListener("hashchange", open);
open();

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch { // not allowed here: select it, so that the keys copy it
      getSelection().selectAllChildren(code);
    }
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
