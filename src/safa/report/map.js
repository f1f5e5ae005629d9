"use strict";
// Draws the map of clients and rounds on a canvas, and below it the details of the client that the reader chose.
window.safaMap = (() => {
  const OVER = 8, NONE = 65535;  // the bit of a cell that says "starts over", and the number of what is missing
  const decoded = new WeakMap();

  // The cells of a map, client by client: what it did, the lag of its update, when that came in.
  async function unpack(text) {
    const packed = atob(text), bytes = new Uint8Array(packed.length);
    for (let place = 0; place < bytes.length; place++) bytes[place] = packed.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer(), count = buffer.byteLength / 5;
    return {
      lag: new Uint16Array(buffer, 0, count), arrival: new Uint16Array(buffer, 2 * count, count),
      state: new Uint8Array(buffer, 4 * count, count),
    };
  }

  const rgb = (colour) => [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));

  // One pixel a cell; the map is this picture, stretched.
  function picture(data, cells) {
    const [rows, columns] = [data.clients.length, data.rounds.length];
    const small = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
    const colours = data.states.map(([, colour]) => { const [r, g, b] = rgb(colour); return (255 << 24 | b << 16 | g << 8 | r) >>> 0; });
    for (let cell = 0; cell < pixels.length; cell++) pixels[cell] = colours[cells.state[cell] & 7];
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
  }

  // Paints the map with its legend and axes; returns where the cells are.
  function paint(canvas, data, cells, config, width, ratio) {
    const [rows, columns] = [data.clients.length, data.rounds.length];
    const thick = Math.min(20, 420 / rows), height = thick * rows, named = thick >= 12;
    const font = `12px ${config.font}`, pen = canvas.getContext("2d");
    pen.font = font;
    const labels = named ? data.clients : data.ends;
    const left = Math.min(150, 16 + Math.max(...labels.map((label) => pen.measureText(label).width)));
    const legend = [...data.legend.map((place) => data.states[place]), ...(data.over ? [["starts over", ""]] : [])];
    let x = left, y = 0;
    const places = legend.map(([name]) => {
      const wide = 36 + pen.measureText(name).width;
      if (x + wide > width && x > left) [x, y] = [left, y + 20];
      return [(x += wide) - wide, y];
    });
    const top = y + 30, spot = { left, top, width: width - left - 14, height, thick, wide: (width - left - 14) / columns };
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((top + height + 40) * ratio);
    Object.assign(canvas.style, { width: `${width}px`, height: `${top + height + 40}px` });
    pen.scale(ratio, ratio);
    Object.assign(pen, { font, textBaseline: "middle", fillStyle: config.background });
    pen.fillRect(0, 0, width, top + height + 40);
    legend.forEach(([name, colour], place) => {
      const [at, line] = places[place];
      pen.fillStyle = colour || config.background;
      pen.fillRect(at, line + 3, 13, 13);
      pen.strokeStyle = colour ? config.axis.gridColor : config.title.color;
      pen.lineWidth = colour ? 1 : 2;
      pen.strokeRect(at + 0.5, line + 3.5, 12, 12);
      pen.fillStyle = config.legend.labelColor;
      pen.fillText(name, at + 19, line + 10);
    });
    pen.imageSmoothingEnabled = spot.wide * ratio < 1 || thick * ratio < 1;
    pen.drawImage(picture(data, cells), left, top, spot.width, height);
    pen.fillStyle = config.background;
    if (spot.wide > 4) for (let column = 1; column < columns; column++) pen.fillRect(left + column * spot.wide - 0.5, top, 1, height);
    if (thick > 5) for (let row = 1; row < rows; row++) pen.fillRect(left, top + row * thick - 0.5, spot.width, 1);
    pen.fillStyle = pen.strokeStyle = config.title.color;
    const large = spot.wide > 5 && thick > 5;
    pen.lineWidth = 1.5;
    for (let cell = 0; data.over && cell < rows * columns; cell++) {
      if (!(cells.state[cell] & OVER)) continue;
      const at = [left + (cell % columns) * spot.wide, top + Math.floor(cell / columns) * thick];
      if (large) pen.strokeRect(at[0] + 1, at[1] + 1, spot.wide - 2, thick - 2);
      else pen.fillRect(at[0], at[1], Math.max(0.5, spot.wide * 0.4), Math.max(0.5, thick));
    }
    pen.fillStyle = config.axis.labelColor;
    pen.textAlign = "right";
    if (named) labels.forEach((label, row) => pen.fillText(label, left - 8, top + (row + 0.5) * thick, left - 8));
    else labels.forEach((label, end) => pen.fillText(label, left - 8, end ? top + height - 7 : top + 7));
    pen.textAlign = "center";
    for (const column of ticks(columns, Math.floor(spot.width / 60))) pen.fillText(data.rounds[column], left + (column + 0.5) * spot.wide, top + height + 12);
    pen.fillText("round", left + spot.width / 2, top + height + 31);
    return spot;
  }

  // Places for at most so many labels.
  function ticks(count, most) {
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((size) => count / size <= most) ?? 1000;
    return [...Array(count).keys()].filter((place) => (place + 1) % step === 0);
  }

  // A round of a client, in words.
  function words(data, cells, cell) {
    const [row, column] = [Math.floor(cell / data.rounds.length), cell % data.rounds.length];
    const told = { client: data.clients[row], round: data.rounds[column], "what happened": data.states[cells.state[cell] & 7][0] };
    if (cells.lag[cell] !== NONE) {
      told["versions behind"] = cells.lag[cell];
      told.arrived = `${(cells.arrival[cell] * data.step_s).toLocaleString("en", { maximumFractionDigits: 1 })} s into the round`;
    }
    if (cells.state[cell] & OVER) told["starts over"] = "yes";
    return told;
  }

  const shape = (name, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };

  // What a client did round by round, and above that how far behind its updates were.
  function lagChart(data, cells, row, config, width) {
    const columns = data.rounds.length, left = 30, high = 96, wide = (width - left - 14) / columns;
    const own = [...Array(columns).keys()].map((column) => row * columns + column), came = own.filter((cell) => cells.lag[cell] !== NONE);
    const most = came.reduce((top, cell) => Math.max(top, cells.lag[cell]), 1);
    const x = (cell) => left + (cell % columns + 0.5) * wide, y = (lag) => 24 + (high - 34) * (1 - lag / most);
    const colour = (cell) => data.states[cells.state[cell] & 7][1], soft = { fill: config.axis.labelColor, "font-size": 12 };
    const said = came.length ? `${came.length} rounds with an update, which is up to ${Math.max(...came.map((cell) => cells.lag[cell]))} versions behind` : "no update came in";
    const chart = shape("svg", { width, height: high + 50, role: "img", "aria-label": `Client ${data.clients[row]} over the rounds: ${said}` });
    chart.append(shape("text", { ...soft, x: 0, y: 11 }, "versions behind"));
    for (const lag of most <= 4 ? Array(most + 1).keys() : [0, Math.floor(most / 2), most]) {
      chart.append(shape("text", { ...soft, x: left - 8, y: y(lag) + 4, "text-anchor": "end" }, lag));
      chart.append(shape("line", { x1: left, x2: width - 14, y1: y(lag), y2: y(lag), stroke: config.axis.gridColor }));
    }
    chart.append(shape("polyline", { points: came.map((cell) => `${x(cell)},${y(cells.lag[cell])}`).join(" "), fill: "none", stroke: config.axis.labelColor, "stroke-width": 1 }));
    for (const cell of came) chart.append(shape("circle", { cx: x(cell), cy: y(cells.lag[cell]), r: columns > 300 ? 1.5 : 3, fill: colour(cell) }));
    for (const cell of own) chart.append(shape("rect", { x: x(cell) - wide / 2, y: high, width: Math.max(0.5, wide - (wide > 4 ? 1 : 0)), height: 14, fill: colour(cell) }));
    for (const column of ticks(columns, Math.floor(width / 60))) chart.append(shape("text", { ...soft, x: x(column), y: high + 29, "text-anchor": "middle" }, data.rounds[column]));
    chart.append(shape("text", { ...soft, x: left + (width - left) / 2, y: high + 47, "text-anchor": "middle" }, "round"));
    return chart;
  }

  const element = (name, text, kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });

  function showClient(details, data, cells, row, config) {
    details.replaceChildren();
    if (row < 0) return;
    const facts = element("dl", "", "facts");
    for (const { name, column, values, meanings } of data.facts) {
      const card = element("div", "");
      card.append(element("dt", `${name} `), element("dd", values[row]));
      if (column) card.firstChild.append(element("code", column));
      if (meanings[row]) card.append(element("dd", meanings[row], "meaning"));
      facts.append(card);
    }
    details.append(facts, lagChart(data, cells, row, config, details.clientWidth || 600));
  }

  // Fill the list of clients; the first entry of it is nobody.
  function wire(box, text) {
    const select = box.closest("figure").querySelector("select");
    select.append(...JSON.parse(text).clients.map((name) => new Option(name, name)));
  }

  async function draw(box, text, config, showTip) {
    const data = JSON.parse(text), figure = box.closest("figure");
    if (!decoded.has(box)) decoded.set(box, await unpack(data.cells));
    const cells = decoded.get(box), columns = data.rounds.length;
    const canvas = document.createElement("canvas"), place = element("div", "", "cells"), mark = element("div", "", "chosen");
    const spot = paint(canvas, data, cells, config, box.clientWidth, Math.max(2, devicePixelRatio));
    place.append(canvas, mark);
    box.replaceChildren(place);
    const select = figure.querySelector("select"), details = figure.querySelector(".client-details");
    const choose = () => {
      const row = data.clients.indexOf(select.value);
      mark.hidden = row < 0;
      Object.assign(mark.style, { left: `${spot.left - 2}px`, width: `${spot.width + 4}px`, top: `${spot.top + row * spot.thick - 2}px`, height: `${spot.thick + 4}px` });
      showClient(details, data, cells, row, config);
    };
    const cellAt = (event) => {
      const at = canvas.getBoundingClientRect();
      const [column, row] = [(event.clientX - at.x - spot.left) / spot.wide, (event.clientY - at.y - spot.top) / spot.thick].map(Math.floor);
      return column >= 0 && column < columns && row >= 0 && row < data.clients.length ? row * columns + column : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const cell = cellAt(event);
      canvas.style.cursor = cell === null ? "" : "pointer";
      showTip(null, event, null, cell === null ? null : words(data, cells, cell));
    });
    canvas.addEventListener("pointerleave", (event) => showTip(null, event, null, null));
    canvas.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (cell !== null) { select.value = data.clients[Math.floor(cell / columns)]; choose(); }
    });
    select.onchange = select.oninput = choose;
    choose();
    return { finalize() {}, view: { toImageURL: async (kind) => canvas.toDataURL(`image/${kind}`) } };
  }
  return { draw, wire };
})();
