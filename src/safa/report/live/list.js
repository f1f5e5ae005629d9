"use strict";
// Keeps the list up to date: rows that have changed come from the server, with the order of all.
(() => {
  const list = document.getElementById("runs");
  const form = document.getElementById("compare");
  let source = null;

  const rows = () => new Map([...list.children].map((row) => [row.dataset.run, row]));

  // Of a row that is there, only what changes is replaced, so that a mark and the focus stay.
  function take(there, name, markup) {
    const template = document.createElement("template");
    template.innerHTML = markup;
    const fresh = template.content.firstElementChild, old = there.get(name);
    if (old) old.querySelector(".glance").replaceWith(fresh.querySelector(".glance"));
    else there.set(name, fresh);
  }

  function apply({ order, rows: changed }) {
    const there = rows();
    for (const [name, markup] of Object.entries(changed)) take(there, name, markup);
    for (const [name, row] of there) if (!order.includes(name)) row.remove();
    order.forEach((name, place) => {
      const row = there.get(name);
      if (row && list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null);
    });
    document.getElementById("empty").hidden = order.length > 0;
    count();
  }

  function count() {
    const chosen = list.querySelectorAll("input:checked").length;
    form.querySelector("button").disabled = chosen < 2;
    form.querySelector("output").value = chosen ? `${chosen} chosen` : "";
  }

  function open() {
    source = new EventSource(list.dataset.url);
    source.addEventListener("rows", (event) => apply(JSON.parse(event.data)));
  }
  function close() {
    source?.close();
    source = null;
  }
  list.addEventListener("change", count);
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : source ?? open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", () => { count(); source ?? open(); });
})();
