"use strict";
// Draws the charts of the page, each when it comes into view, and makes the tables sort and filter.
(() => {
  const root = document.documentElement;
  const { configs, recoloured } = JSON.parse(document.getElementById("themes").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const boxes = [...document.querySelectorAll(".chart")];
  const specs = new Map(boxes.map((box) => [box, box.firstElementChild.textContent]));
  const drawn = new Map();
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));
  tip.setAttribute("role", "tooltip");
  let paper = false;

  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  // Tooltips are built from text alone; a name that begins with "_" is for the chart and not for the reader.
  function showTip(_, event, item, value) {
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    const entries = typeof value === "object" ? Object.entries(value).filter(([name]) => !/^(_|Symbol)/.test(name)) : [["", value]];
    const list = document.createElement("dl");
    for (const [name, shown] of entries) list.append(element("dt", name), element("dd", String(shown ?? "") || "–"));
    tip.replaceChildren(list);
    const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 10 : event.clientX + 14;
    const top = event.clientY + 16 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  // The theme that a chart must have now; a chart that has it already is not drawn again.
  const look = () => (paper ? "paper" : `${dark.matches ? "dark" : "light"}${narrow.matches ? " narrow" : ""}`);

  async function draw(box) {
    const wanted = look();
    if (box.dataset.look === wanted) return;
    box.dataset.look = wanted;
    const night = wanted.startsWith("dark");
    const text = night ? specs.get(box).replace(/#[0-9a-f]{6}/g, (colour) => recoloured[colour] ?? colour) : specs.get(box);
    let longest = 4;
    const spec = JSON.parse(text, (name, value) => {
      if (name === "domain" && Array.isArray(value)) for (const label of value) longest = Math.max(longest, String(label).length);
      return value;
    });
    const columns = Math.max(1, Math.floor(box.clientWidth / Math.min(240, 45 + 6.6 * longest)));
    const config = configs[night ? "dark" : "light"];
    drawn.get(box)?.finalize();
    const place = element("div");  // the drawing sets its own label; the box keeps the label from the page
    box.replaceChildren(place);
    const result = await vegaEmbed(place, spec, {
      mode: "vega-lite", actions: false, renderer: box.dataset.renderer, tooltip: showTip,
      config: { ...config, legend: { ...config.legend, columns } },
    });
    drawn.set(box, result);
    box.dataset.drawn = wanted;
    box.style.minHeight = "";
  }

  // Charts are drawn one after the other, so that the page stays responsive.
  let queue = Promise.resolve();
  function later(list) {
    for (const box of list) queue = queue.then(() => draw(box)).catch((error) => console.error(error)).then(() => new Promise((go) => setTimeout(go)));
    queue.then(() => { root.dataset.ready = "true"; });
  }

  const watcher = new IntersectionObserver((entries) => {
    const near = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    near.forEach((box) => watcher.unobserve(box));
    later(near);
  }, { rootMargin: "500px 0px" });

  function refresh() {
    delete root.dataset.ready;
    for (const box of boxes) { watcher.unobserve(box); watcher.observe(box); }
    if (!boxes.length) root.dataset.ready = "true";
  }

  // Paper is always light, of a fixed width, and has every chart on it.
  function print(on) {
    if (paper === on) return;
    paper = on;
    root.classList.toggle("paper", on);
    if (on) Promise.all(boxes.map(draw)).then(() => { root.dataset.printable = "true"; });
    else { delete root.dataset.printable; refresh(); }
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  dark.addEventListener("change", refresh);
  narrow.addEventListener("change", refresh);

  async function save(box, kind, name) {
    const link = element("a");
    link.href = await drawn.get(box).view.toImageURL(kind, 2);
    link.download = `${name}.${kind}`;
    link.click();
  }
  for (const box of boxes) {
    const figure = box.closest("figure");
    const title = figure.querySelector("h3").textContent;
    const buttons = element("span");
    buttons.className = "save";
    for (const kind of ["svg", "png"]) {
      const button = Object.assign(element("button", kind.toUpperCase()), { type: "button" });
      button.setAttribute("aria-label", `Save “${title}” as ${kind.toUpperCase()}`);
      button.addEventListener("click", () => save(box, kind, title.toLowerCase().replace(/[^a-z0-9]+/g, "-")));
      buttons.append(button);
    }
    figure.querySelector("figcaption").append(" ", buttons);
  }

  // Numbers are sorted by size, texts by the alphabet with numbers inside as numbers; missing values are last.
  const collator = new Intl.Collator("en", { numeric: true });
  function compare(one, two, sign) {
    const [a, b] = [one, two].map((text) => (text === "" ? NaN : Number(text)));
    if (one === "" || two === "") return (one === "") - (two === "");
    const missing = Number.isNaN(a) - Number.isNaN(b);
    if (missing) return missing;
    return sign * (Number.isNaN(a) ? collator.compare(one, two) : Math.sign(a - b) || 0);
  }
  function sort(table, head) {
    const place = [...head.parentNode.children].indexOf(head);
    const rising = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row, row.cells[place].dataset.value]);
    rows.sort((a, b) => compare(a[1], b[1], rising ? 1 : -1));
    body.append(...rows.map(([row]) => row));
  }
  function filter(table, words, count) {
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  }
  for (const part of document.querySelectorAll(".table")) {
    const table = part.querySelector("table");
    for (const head of table.tHead.rows[0].cells) head.querySelector("button").addEventListener("click", () => sort(table, head));
    const input = part.querySelector("input");
    const count = part.querySelector(".count");
    input?.addEventListener("input", () => filter(table, input.value.toLowerCase().split(/\s+/).filter(Boolean), count));
  }
  refresh();
})();
