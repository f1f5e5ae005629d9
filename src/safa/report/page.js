"use strict";
// Draws the charts of the page, makes the tables sort and filter, and replaces blocks by newer ones (window.safa).
(() => {
  const root = document.documentElement;
  const { configs, recoloured } = JSON.parse(document.getElementById("themes").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const specs = new WeakMap(), drawn = new WeakMap();
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));
  tip.setAttribute("role", "tooltip");
  let paper = false;

  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const charts = () => all(".chart");
  const pause = () => new Promise((go) => setTimeout(go));
  const idle = window.requestIdleCallback ? () => new Promise((go) => requestIdleCallback(go, { timeout: 500 })) : pause;

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
    if (box.dataset.look === wanted || !box.clientWidth) return;  // a browser may give what is folded no width
    box.dataset.look = wanted;
    const night = wanted.startsWith("dark");
    const config = configs[night ? "dark" : "light"];
    const text = night ? specs.get(box).replace(/#[0-9a-f]{6}/g, (colour) => recoloured[colour] ?? colour) : specs.get(box);
    drawn.get(box)?.finalize();
    drawn.set(box, await (box.dataset.renderer === "map" ? safaMap.draw(box, text, config, showTip) : drawChart(box, text, config)));
    box.dataset.drawn = wanted;
    box.style.minHeight = "";
  }

  function drawChart(box, text, config) {
    let longest = 4;
    const spec = JSON.parse(text, (name, value) => {
      if (name === "domain" && Array.isArray(value)) for (const label of value) longest = Math.max(longest, String(label).length);
      return value;
    });
    const columns = Math.max(1, Math.floor(box.clientWidth / Math.min(240, 45 + 6.6 * longest)));
    const place = element("div");
    place.ariaHidden = "true";  // the label of the box says what the chart shows
    box.replaceChildren(place);
    return vegaEmbed(place, spec, {
      mode: "vega-lite", actions: false, renderer: box.dataset.renderer, tooltip: showTip,
      config: { ...config, legend: { ...config.legend, columns } },
    });
  }

  // One thing after the other, so that the page stays responsive.
  let queue = Promise.resolve();
  const soon = (job) => (queue = queue.then(job).catch((error) => console.error(error)));
  const drawSoon = (box) => (soon(() => draw(box)), soon(pause));

  // A chart that is near the window is drawn before the others, which are drawn when there is nothing else to do.
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) drawSoon(target);
  }, { rootMargin: "300px 0px" });

  async function drawRest() {
    for (const box of charts()) {
      if (box.dataset.look === look()) continue;
      await idle();
      await soon(() => draw(box));
    }
    await queue;
  }

  function refresh() {
    delete root.dataset.ready;
    for (const box of charts()) { watcher.unobserve(box); watcher.observe(box); }
    window.safa.ready = pause().then(drawRest).then(() => { root.dataset.ready = "true"; });
  }

  const drawAll = () => Promise.all(charts().map(draw));

  // Paper is always light, of a fixed width, and has every chart on it.
  let folded = [];
  function print(on) {
    if (paper === on) return;
    paper = on;
    root.classList.toggle("paper", on);
    if (on) folded = all("details:not([open])");
    for (const part of folded) part.open = on;
    if (on) drawAll().then(() => { root.dataset.printable = "true"; });
    else { delete root.dataset.printable; refresh(); }
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  dark.addEventListener("change", refresh);
  narrow.addEventListener("change", refresh);
  let settled = 0;
  addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => {
      const stale = all("[data-renderer=map]").filter((box) => box.clientWidth !== box.querySelector("canvas")?.clientWidth);
      for (const box of stale) delete box.dataset.look;
      if (stale.length) refresh();
    }, 200);
  });
  document.addEventListener("toggle", ({ target }) => { if (target.open) for (const box of all(".chart", target)) drawSoon(box); }, true);

  async function save(box, kind, name) {
    const link = element("a");
    link.href = await drawn.get(box).view.toImageURL(kind, 2);
    link.download = `${name}.${kind}`;
    link.click();
  }
  function wireFigure(box) {
    specs.set(box, box.firstElementChild.textContent);
    const map = box.dataset.renderer === "map";
    if (map) safaMap.wire(box, specs.get(box));
    const figure = box.closest("figure");
    const title = figure.querySelector("h3").textContent;
    const buttons = element("span");
    buttons.className = "save";
    for (const kind of map ? ["png"] : ["svg", "png"]) {
      const button = Object.assign(element("button", kind.toUpperCase()), { type: "button" });
      button.setAttribute("aria-label", `Save “${title}” as ${kind.toUpperCase()}`);
      button.addEventListener("click", () => save(box, kind, title.toLowerCase().replace(/[^a-z0-9]+/g, "-")));
      buttons.append(button);
    }
    figure.querySelector("figcaption").append(" ", buttons);
  }

  function addOpener(section) {
    const parts = [...section.children].filter((part) => part.matches("details"));
    if (parts.length < 2) return;
    const folded = () => parts.some((part) => !part.open);
    const button = Object.assign(element("button", "Open all"), { type: "button", className: "opener" });
    const label = () => { button.textContent = folded() ? "Open all" : "Close all"; };
    button.addEventListener("click", () => {
      const open = folded();
      for (const part of parts) part.open = open;
    });
    for (const part of parts) part.addEventListener("toggle", label);
    parts[0].before(button);
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
  function sort(table, head, rising) {
    const place = [...head.parentNode.children].indexOf(head);
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
  function wireTable(part) {
    const table = part.querySelector("table");
    for (const head of table.tHead.rows[0].cells) {
      head.querySelector("button").addEventListener("click", () => sort(table, head, head.getAttribute("aria-sort") !== "ascending"));
    }
    const input = part.querySelector("input");
    const count = part.querySelector(".count");
    input?.addEventListener("input", () => filter(table, input.value.toLowerCase().split(/\s+/).filter(Boolean), count));
  }

  // Blocks by their keys, as the page was sent them.
  const sent = new Map();
  function wire(block) {
    sent.set(block.dataset.block, block.outerHTML);
    all(".chart", block).forEach(wireFigure);
    if (block.matches(".table")) wireTable(block);
  }

  // What the reader did to a block is done to the one that takes its place: order, filter, scrolling, focus.
  function carry(old, fresh) {
    const controls = "input, select, button", [before, after] = [all(controls, old), all(controls, fresh)];
    before.forEach((control, place) => {
      const same = after[place];
      if (!same || same.tagName !== control.tagName) return;
      if (control.value !== same.value) {
        same.value = control.value;
        same.dispatchEvent(new Event("input"));
      }
      const order = control.closest("th")?.getAttribute("aria-sort");
      if (order && order !== "none") sort(same.closest("table"), same.closest("th"), order === "ascending");
    });
    return () => {
      const focused = before.indexOf(document.activeElement);
      const [from, to] = [old, fresh].map((block) => block.querySelector(".scroll"));
      const { scrollTop, scrollLeft } = from ?? {};
      old.replaceWith(fresh);
      if (from && to) Object.assign(to, { scrollTop, scrollLeft });
      if (focused >= 0) after[focused]?.focus({ preventScroll: true });
    };
  }

  // The new block is drawn out of sight, at the width of the old one, and then takes its place; one that is folded is
  // drawn when it is opened.
  async function replace(old, fresh) {
    wire(fresh);
    const exchange = carry(old, fresh);
    const boxes = all(".chart", fresh);
    if (boxes.length && old.clientWidth && !old.closest("details:not([open])")) {
      fresh.style.cssText = `position: absolute; visibility: hidden; width: ${old.clientWidth}px`;
      old.after(fresh);
      await Promise.all(boxes.map(draw));
      fresh.removeAttribute("style");
    }
    tip.hidden ||= old.matches(":hover");
    for (const box of all(".chart", old)) { watcher.unobserve(box); drawn.get(box)?.finalize(); }
    exchange();
    boxes.forEach((box) => watcher.observe(box));
  }

  // A list that the reader has opened would be closed if its block were replaced: the block waits for the choice.
  const waiting = new Map();
  let opened = null;
  document.addEventListener("pointerdown", ({ target }) => { opened = target.closest("select"); }, true);
  for (const kind of ["change", "focusout", "keydown"]) document.addEventListener(kind, () => {
    opened = null;
    if (!waiting.size) return;
    setTimeout(update, 0, Object.fromEntries(waiting));
    waiting.clear();
  });

  // Replace the blocks with these keys by the HTML given, where it differs; false if the page has no place for one.
  async function update(blocks) {
    let known = true;
    for (const [key, markup] of Object.entries(blocks)) {
      const template = document.createElement("template");
      template.innerHTML = markup;
      const fresh = template.content.firstElementChild;
      const old = document.querySelector(`[data-block="${CSS.escape(key)}"]`);
      if (!old) known = false;
      else if (opened && old.contains(opened)) waiting.set(key, markup);
      else if (fresh.outerHTML !== sent.get(key)) await soon(() => replace(old, document.adoptNode(fresh)));
    }
    return known;
  }

  all("[data-block]:not(details)").forEach(wire);
  all("section").forEach(addOpener);
  // With "#open=all" behind its address, a page is open from the start: for captures of the whole page.
  const openAll = () => { if (location.hash === "#open=all") for (const part of all("details")) part.open = true; };
  openAll();
  addEventListener("hashchange", openAll);
  window.safa = { update, drawAll };
  charts().filter((box) => box.getBoundingClientRect().top < innerHeight).forEach(drawSoon);  // before the page is loaded
  refresh();
})();
