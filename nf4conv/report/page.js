// Draws the report of `nf4conv verify`: page.py puts this script into page.html, and the report as
// JSON beside it. docs/json.md describes the report's fields.
"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const rest = document.getElementById("rest");

// --- text and numbers ---

// characters that would break lines, or write from right to left
const hidden = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const escaped = (char) => "\\u" + char.codePointAt(0).toString(16).padStart(4, "0");
const shown = (text) => String(text).replace(hidden, escaped);
// JSON cannot spell these numbers: the report has strings in their place
const number = (value) => ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[value] ?? value;
function figure(value, digits) {
  if (value === null) return "";
  return Number.isFinite(number(value)) ? value.toFixed(digits) : String(value);
}
const count = (value) => value.toLocaleString("en-US");
function size(bytes) {
  if (bytes >= 1e9) return (bytes / 1e9).toFixed(2) + " GB";
  if (bytes >= 1e6) return (bytes / 1e6).toFixed(2) + " MB";
  if (bytes >= 1e3) return (bytes / 1e3).toFixed(2) + " kB";
  return bytes.toFixed(0) + " B";
}
function short(value) {
  if (value >= 1e9) return (value / 1e9).toFixed(2) + " B";
  if (value >= 1e6) return (value / 1e6).toFixed(2) + " M";
  return count(value);
}

// --- elements ---

function make(tag, content = "", options = {}) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) element.setAttribute(key, value);
  const parts = Array.isArray(content) ? content : [content];
  for (const part of parts) element.append(part instanceof Node ? part : shown(part));
  return element;
}

// Appends a section to the page.
function section(title, ...content) {
  const box = make("section", [make("h2", title), ...content]);
  rest.append(box);
  return box;
}

// Makes a table whose first column holds names; `classes` are those of the columns.
function table(caption, head, rows, classes = []) {
  const titles = head.map((title, index) =>
    make("th", title, { scope: "col", class: classes[index] ?? "" }),
  );
  const body = rows.map((cells) =>
    make(
      "tr",
      cells.map((cell, index) =>
        index === 0
          ? make("th", cell, { scope: "row" })
          : make("td", cell, { class: classes[index] ?? "", "data-title": head[index] }),
      ),
    ),
  );
  return make("table", [
    make("caption", make("span", caption)),
    make("thead", make("tr", titles)),
    make("tbody", body),
  ]);
}

// Shows a name that may break into lines after each dot.
const broken = (name) =>
  make(
    "span",
    shown(name)
      .split(/(?<=\.)/)
      .flatMap((part) => [part, make("wbr")]),
  );
const scroll = (content) => make("div", content, { class: "scroll" });

// --- the weights that were compared with a source ---

const format = (row) => row.quant_type + (row.double_quant ? "+" : "") + "/" + row.blocksize;
const kind = (row) => (row.stack ? row.stack + ".*." : "") + row.kind;
const error = (row) => number(row.relative_error);
const beyond = (row) => !(error(row) <= row.tolerance);
const decoded = report.is_decoded;
const compared = report.weights.filter((row) => row.relative_error !== null);
const finite = compared
  .map(error)
  .filter(Number.isFinite)
  .sort((a, b) => a - b);
// the colours of the map span these: one broken weight must not flatten the rest
const within = compared
  .filter((row) => !beyond(row))
  .map(error)
  .sort((a, b) => a - b);
const low = within[0] ?? 0;
const high = within[within.length - 1] ?? 0;
const largest =
  compared.find((row) => !Number.isFinite(error(row)))?.relative_error ??
  finite[finite.length - 1] ??
  0;
const middle = (sorted) => sorted[Math.floor(sorted.length / 2)];
const normal = Object.fromEntries(
  report.normal.map(([name, least, most]) => [name, [least, most]]),
);
const usual = (row) => normal[row.quant_type + "/" + row.blocksize];
function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = key(row);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}

// --- sections, from the top of the page to its end ---

function answer() {
  const outside = compared.filter((row) => error(row) > usual(row)[1] && !beyond(row));
  const words = Object.entries(normal)
    .map(([name, [least, most]]) => `${least} to ${most} for ${name.toUpperCase()}`)
    .join(", ");
  const lines = [make("b", report.passed ? "Yes. " : "No. "), report.verdict];
  document
    .getElementById("answer")
    .replaceChildren(...lines.map((part) => (part instanceof Node ? part : make("span", part))));
  const box = document.querySelector(".verdict");
  if (compared.length) {
    box.append(
      make(
        "p",
        `Relative errors lie between ${figure(finite[0] ?? largest, 4)} and ` +
          `${figure(largest, 4)}. Normal for trained weights: ${words}.`,
      ),
    );
    if (report.passed && outside.length)
      box.append(
        make(
          "p",
          `${count(outside.length)} weights lie above what is normal, within the tolerance: ` +
            "a few large values do that. They are as good as the format can be.",
        ),
      );
  } else if (decoded && report.tensors)
    box.append(
      make(
        "p",
        `The source was decoded again: ${count(report.tensors.values)} values were compared bit ` +
          `for bit, ${count(report.tensors.values_differing)} differ.`,
      ),
    );
  else
    box.append(
      make(
        "p",
        `Structure, config and ${decoded ? "record" : "scales"} were checked. Values were not ` +
          "compared: --source names what to compare them with.",
      ),
    );
}

function tiles() {
  const found = [
    decoded
      ? [count(report.tensors?.compared ?? 0), "tensors compared"]
      : [count(report.weights.length), "packed weights"],
    [short(report.parameters), "parameters"],
    [report.bits_per_parameter.toFixed(2), "bits per parameter"],
    [size(Object.values(report.sizes).reduce((a, b) => a + b, 0)), "in all tensors"],
  ];
  if (compared.length)
    found.push(
      [figure(largest, 4), "largest relative error"],
      [report.identical ? "yes" : "no", "same bytes as quantizing the source"],
    );
  else if (decoded && report.tensors)
    found.push(
      [count(report.tensors.differing), "tensors differ"],
      [String(report.tensors.largest_difference), "largest difference"],
    );
  document
    .getElementById("tiles")
    .append(...found.map(([value, label]) => make("div", [make("b", value), make("span", label)])));
}

// Shows the first of several lines, and the others when it is opened.
const folded = (lines) =>
  make("details", [
    make("summary", `${lines[0]} … and ${count(lines.length - 1)} more`),
    make(
      "ul",
      lines.slice(1).map((line) => make("li", line)),
    ),
  ]);

function findings() {
  if (!report.findings.length) return;
  const rows = report.findings.map((group) => [
    group.check,
    make("span", group.is_fault ? "✗ FAIL" : "note", { class: group.is_fault ? "bad" : "" }),
    broken(group.kind || "the files"),
    count(group.lines.length),
    group.lines.length === 1 ? group.lines[0] : folded(group.lines),
  ]);
  section(
    "Findings",
    scroll(
      table(
        "What is wrong, or worth knowing, by check and kind of module",
        ["check", "", "kind of module", "times", "where and what"],
        rows,
        ["", "left", "text", "", "text"],
      ),
    ),
  );
}

function checks() {
  const all = Object.entries(report.checks);
  const row = ([name, check]) => [
    name,
    make("span", check.passed ? "✓ ok" : "✗ FAIL", { class: check.passed ? "ok" : "bad" }),
    check.meaning,
  ];
  const list = (some, caption) =>
    scroll(
      table(caption, ["check", "result", "what it means"], some.map(row), ["", "left", "text"]),
    );
  const [passed, failed] = [
    all.filter(([, check]) => check.passed),
    all.filter(([, check]) => !check.passed),
  ];
  const folded = make("details", [
    make("summary", `${passed.length} of ${all.length} checks passed`),
    list(passed, "Passed"),
  ]);
  section("Checks", ...(failed.length ? [list(failed, "Failed")] : []), folded);
}

function kinds() {
  const groups = [...grouped(compared, (row) => kind(row) + " " + format(row)).values()];
  const limits = compared.map((row) => row.tolerance);
  const ends = [...within, ...limits, ...Object.values(normal).flat()];
  const [start, stop] = [Math.min(...ends) * 0.97, Math.max(...ends) * 1.03];
  const place = (value) => Math.min(Math.max((100 * (value - start)) / (stop - start), 0), 100);
  const rows = groups.map((rows) => {
    const errors = rows
      .map(error)
      .filter(Number.isFinite)
      .sort((a, b) => a - b);
    const [least, most] = [errors[0] ?? NaN, errors[errors.length - 1] ?? NaN];
    const [from, to] = usual(rows[0]);
    const span = (name, left, width) =>
      make("span", "", {
        class: name,
        style: `left:${left}%;${width === undefined ? "" : `width:${width}%`}`,
      });
    const parts = [span("band", place(from), place(to) - place(from))];
    if (errors.length)
      parts.push(
        span("found", place(least), place(most) - place(least)),
        span("middle", place(middle(errors))),
      );
    parts.push(span("limit", place(rows[0].tolerance)));
    return [
      broken(kind(rows[0])),
      format(rows[0]),
      count(rows.length),
      figure(least, 4),
      figure(middle(errors) ?? NaN, 4),
      figure(most, 4),
      `${from} to ${to}`,
      make("div", parts, { class: "range", "aria-hidden": "true" }),
    ];
  });
  section(
    "Where each kind of module lies",
    scroll(
      table(
        "Relative error: the line spans what was found, its tick is the median, the shade is " +
          "what is normal for trained weights, the line at the right is the tolerance",
        ["kind of module", "format", "weights", "smallest", "median", "largest", "normal", ""],
        rows,
      ),
    ),
  );
}

function map() {
  const allWithin = within.length === compared.length;
  const box = section(
    "Relative error of each layer",
    make(
      "p",
      "Each number is a layer. The farther its colour is from the first of these, the larger its " +
        "error. The table below has every value.",
      { class: "soft" },
    ),
    make("div", "", {
      class: "legend",
      role: "img",
      "aria-label": `colours from ${figure(low, 4)} to ${figure(high, 4)}`,
    }),
    make(
      "div",
      [
        make("span", `${figure(low, 4)}, the smallest here`),
        make("span", `${figure(high, 4)}, the largest${allWithin ? "" : " within the tolerance"}`),
      ],
      { class: "ends" },
    ),
  );
  if (compared.some(beyond))
    box.append(
      make("p", [make("span", "underlined on red", { class: "bad" }), ": beyond the tolerance"]),
    );
  const groups = make("div", "", { class: "kinds" });
  for (const [name, rows] of grouped(compared, kind)) {
    const cells = [...grouped(rows, (row) => row.layer)]
      .sort(([a], [b]) => a - b)
      .map(([layer, members]) => {
        const worst = members.reduce((a, b) =>
          error(b) > error(a) || Number.isNaN(error(b)) ? b : a,
        );
        const at =
          high > low ? Math.min(Math.max((100 * (error(worst) - low)) / (high - low), 0), 100) : 50;
        const many = members.length > 1 ? `, the largest of ${members.length}` : "";
        const text = `${shown(worst.name)}: ${figure(worst.relative_error, 4)}${many}`;
        const cell = make(
          "li",
          [
            make("span", layer ?? "·", { "aria-hidden": "true" }),
            make("span", text, { class: "sr" }),
          ],
          { title: text, style: `--at:${at.toFixed(1)}` },
        );
        if (beyond(worst)) cell.className = "beyond";
        return cell;
      });
    groups.append(make("div", [make("h3", name), make("ol", cells, { class: "cells" })]));
  }
  box.append(groups);
}

function distribution() {
  const bins = Array(40).fill(0);
  for (const value of within)
    bins[Math.min(Math.floor((40 * (value - low)) / (high - low || 1)), 39)] += 1;
  const tallest = Math.max(...bins);
  const left = compared.length - within.length;
  const bars = bins.map((some) =>
    make("span", "", { style: `height:${(100 * some) / tallest}%`, title: `${some} weights` }),
  );
  section(
    "Distribution",
    make("div", bars, {
      class: "bars",
      role: "img",
      "aria-label":
        `${within.length} weights between ${figure(low, 4)} and ${figure(high, 4)}, ` +
        `half of them below ${figure(middle(within) ?? NaN, 4)}`,
    }),
    make("div", [make("span", figure(low, 4)), make("span", figure(high, 4))], {
      class: "ends",
      style: "max-width:640px",
    }),
    make(
      "p",
      `${count(within.length)} weights by relative error; the tallest bar is ` +
        `${count(tallest)}${left ? `; ${count(left)} beyond the tolerance not drawn` : ""}`,
      { class: "soft" },
    ),
  );
}

// the same projection of all experts of a layer as one row, with the range of its errors
function gathered(rows) {
  const groups = new Map();
  for (const one of rows) {
    const found = /^(.*\bexperts)\.\d+\.(.+)$/.exec(one.name);
    const name = found ? `${found[1]}.*.${found[2]}` : one.name;
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  const numbers = (members, key) =>
    members.map((one) => one[key]).filter((value) => value !== null);
  const best = (members, key, choose) => {
    const found = numbers(members, key);
    return found.length ? found.reduce((a, b) => choose(number(a), number(b))) : null;
  };
  const sum = (a, b) => a + b;
  return [...groups].map(([name, members]) =>
    members.length === 1
      ? members[0]
      : {
          ...members[0],
          name: `${name} (${count(members.length)})`,
          parameters: best(members, "parameters", sum),
          bytes: best(members, "bytes", sum),
          smallest_relative_error: best(members, "relative_error", Math.min),
          relative_error: best(members, "relative_error", Math.max),
          snr_db: best(members, "snr_db", Math.min),
          largest_error_of_absmax: best(members, "largest_error_of_absmax", Math.max),
          outside: best(members, "outside", sum),
        },
  );
}

function weights() {
  const range = (value, one) =>
    one.smallest_relative_error === undefined
      ? figure(value, 4)
      : `${figure(one.smallest_relative_error, 4)} … ${figure(value, 4)}`;
  const columns = [
    ["weight", (row) => row.name, broken],
    ["format", format, shown],
    ["parameters", (row) => row.parameters, count],
    ["size", (row) => row.bytes, size],
    ["relative error", (row) => row.relative_error, range],
    ["tolerance", (row) => row.tolerance, (value) => figure(value, 3)],
    ["SNR dB", (row) => row.snr_db, (value) => figure(value, 2)],
    ["max of absmax", (row) => row.largest_error_of_absmax, (value) => figure(value, 3)],
    ["outside", (row) => row.outside, (value) => (value === null ? "" : count(value))],
  ].filter(([, get]) => report.weights.some((row) => get(row) !== null));
  const row = (one) =>
    make(
      "tr",
      columns.map(([title, get, show], index) =>
        make(
          index ? "td" : "th",
          show(get(one), one),
          index ? { "data-title": title } : { scope: "row" },
        ),
      ),
    );
  const every = report.weights.map((one) => [one, row(one)]);
  const few = gathered(report.weights).map((one) => [one, row(one)]);
  const hasExperts = few.length < every.length;
  const body = make("tbody");
  const status = make("caption", "", { "aria-live": "polite" });
  const search = make("input", "", {
    type: "search",
    placeholder: "part of a name, such as layers.7. or up_proj",
    "aria-label": "show weights whose names contain",
  });
  function fill() {
    const wanted = every.filter(([one]) =>
      one.name.toLowerCase().includes(search.value.toLowerCase()),
    );
    const lines = search.value ? wanted : few;
    body.replaceChildren(...lines.map(([, line]) => line));
    const found = `${count(wanted.length)} of ${count(every.length)} weights`;
    const how = hasExperts && !search.value ? "; experts of a layer share a row" : "";
    status.textContent = `${found}${how}; a click on a title sorts`;
  }
  const titles = columns.map(([title, get], index) => {
    const button = make("button", title, { type: "button" });
    const head = make("th", button, { scope: "col", "aria-sort": "none" });
    button.onclick = () => {
      const down =
        head.getAttribute("aria-sort") === (index ? "none" : "ascending") ||
        (index > 0 && head.getAttribute("aria-sort") === "ascending");
      for (const other of titles) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (one) => {
        const value = number(get(one));
        return Number.isNaN(value) ? Infinity : (value ?? -Infinity);
      };
      const order = ([a], [b]) =>
        (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1);
      every.sort(order);
      few.sort(order);
      fill();
    };
    return head;
  });
  search.oninput = fill;
  section(
    "All weights",
    search,
    make("div", make("table", [status, make("thead", make("tr", titles)), body]), {
      class: "tall",
      tabindex: "0",
      role: "region",
      "aria-label": "all weights",
    }),
  );
  fill();
  if (compared.length)
    columns.forEach(
      ([title], index) => title === "relative error" && titles[index].firstChild.click(),
    );
}

function sizes() {
  const words = {
    codes: "codes, 4 bits each",
    scales: "scales",
    tables: "tables and quant states",
    not_packed: "not packed",
  };
  const all = Object.entries(report.sizes);
  const total = Math.max(
    all.reduce((sum, [, bytes]) => sum + bytes, 0),
    1,
  );
  const bar = all.map(([, bytes], index) =>
    make("span", "", { class: `s${index}`, style: `width:${(100 * bytes) / total}%` }),
  );
  const rows = all.map(([name, bytes], index) => [
    make("span", [make("span", "", { class: `key s${index}` }), words[name]]),
    size(bytes),
    ((100 * bytes) / total).toFixed(2) + " %",
  ]);
  section(
    "Size",
    make("div", bar, { class: "share", "aria-hidden": "true" }),
    table("What the bytes are for", ["tensors", "size", "share"], rows),
  );
}

function words() {
  const meanings = {
    "NF4, FP4":
      "4-bit data types. nf4/64: 64 weights share one scale. A + means that the scales are " +
      "quantized too.",
    "relative error":
      "‖W − Ŵ‖ / ‖W‖: how far the decoded weights Ŵ are from those of the source W, by their " +
      "Frobenius norms.",
    normal:
      "what trained weights have in this format, from measurements and from distributions with " +
      "light to heavy tails.",
    tolerance:
      "the largest relative error that passes. A few huge values in a weight can honestly exceed " +
      "it.",
    SNR: "signal-to-noise ratio, −20 · log₁₀ of the relative error, in decibels (dB).",
    absmax:
      "the largest magnitude in a block of weights: its scale. “max of absmax” is the largest " +
      "error of a value in units of it.",
    outside:
      "number of values with a larger error than the format can make; 0 unless something is broken.",
  };
  section(
    "Words",
    make(
      "dl",
      Object.entries(meanings).flatMap(([word, text]) => [make("dt", word), make("dd", text)]),
    ),
  );
}

function settings() {
  const rows = Object.entries({
    command: report.command,
    date: report.date,
    checkpoint: report.path,
    source: report.source ?? "none",
    ...report.settings,
    seconds: report.seconds.toFixed(1),
  });
  if (report.made)
    rows.push([
      "made by",
      `nf4conv ${report.made.version} ${report.made.command}, from ${report.made.source.id}`,
    ]);
  section(
    "How it was checked",
    table(
      "Options and versions",
      ["setting", "value"],
      rows.map(([key, value]) => [key, String(value)]),
      ["", "text"],
    ),
  );
}

document.getElementById("name").textContent = shown(report.path);
if (decoded)
  document.getElementById("asked").textContent = report.tensors
    ? "what its source decodes to"
    : "a sound decoded checkpoint";
else if (!compared.length)
  document.getElementById("asked").textContent = "a sound 4-bit checkpoint";
answer();
tiles();
findings();
checks();
if (compared.length) {
  kinds();
  map();
}
if (within.length) distribution();
if (!decoded) weights();
sizes();
words();
settings();
