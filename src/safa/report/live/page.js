"use strict";
// Lets an open page grow: blocks that have changed come from the server. A page that nobody sees asks for nothing.
(() => {
  const address = document.getElementById("live").dataset.url;
  if (!address) return;
  let source = null;

  // The page has no place for a block: something is there that was not there before.
  const apply = async (blocks) => { if (!(await window.safa.update(blocks))) location.reload(); };

  // A page that is not sent block by block is asked for anew, and its blocks are taken from it.
  async function refetch() {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const blocks = [...fresh.querySelectorAll("[data-block]:not(details)")];
    const missing = [...document.querySelectorAll("[data-block]:not(details)")].length !== blocks.length;
    if (missing) location.reload();
    else await apply(Object.fromEntries(blocks.map((block) => [block.dataset.block, block.outerHTML])));
  }

  let queue = Promise.resolve();
  const next = (job) => { queue = queue.then(job).catch(() => {}); };
  function open() {
    source = new EventSource(address);
    source.addEventListener("bar", (event) => { document.querySelector(".bar .glance").outerHTML = JSON.parse(event.data); });
    source.addEventListener("blocks", (event) => next(() => apply(JSON.parse(event.data))));
    source.addEventListener("reload", () => location.reload());
    source.addEventListener("stale", () => next(refetch));
  }
  function close() {
    source?.close();
    source = null;
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : source ?? open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", () => source ?? open());
})();
