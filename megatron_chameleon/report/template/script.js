"use strict";
// Sortable tables, and a switch between light and dark.
(() => {
  const root = document.documentElement;
  const KEY = "report-theme";

  // Storage may be blocked, or unavailable for a local file; the theme is then not stored.
  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; }
  }
  function remember(theme) {
    try { localStorage.setItem(KEY, theme); } catch { /* the choice holds until the page is left */ }
  }

  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
  const stored = remembered();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored; // before the first paint

  function setUpTheme() {
    if (!CSS.supports("color", "light-dark(#000, #fff)")) return; // the page is always light
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", isDark() ? "Show in light colours" : "Show in dark colours");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remember(root.dataset.theme);
      show();
    });
    systemIsDark.addEventListener("change", show);
    button.hidden = false;
    show();
  }

  const NUMBER = /[+\-\u2212]?(?:\d[\d,]*(?:\.\d+)?(?:e[+\-]?\d+)?|inf(?![a-z]))/gi;
  const STARTS_WITH_NUMBER = new RegExp(`^${NUMBER.source}`, "i");

  // Return the figures of a cell ("0.1 to 0.2" has two); empty if it does not start with one.
  function figures(text) {
    if (!STARTS_WITH_NUMBER.test(text)) return [];
    return text.match(NUMBER).map((figure) =>
      Number(figure.replaceAll(",", "").replace("\u2212", "-").replace(/inf/i, "Infinity")));
  }

  const isMissing = (text) => text === "" || text === "-" || text === "unknown" || /^[+-]?nan\b/.test(text);

  function compareFigures(a, b) {
    for (let i = 0; i < Math.min(a.length, b.length); i++) {
      if (a[i] !== b[i]) return a[i] < b[i] ? -1 : 1;
    }
    return a.length - b.length;
  }

  function textOf(cell) {
    return (cell.querySelector("strong") ?? cell).textContent.trim();
  }

  const collator = new Intl.Collator(undefined, { numeric: true });
  const byName = (a, b) => collator.compare(a, b);

  // Sort numerically if every present cell has a figure, otherwise alphabetically.
  function comparing(texts) {
    const isNumeric = texts.some((text) => figures(text).length > 0) &&
      texts.every((text) => isMissing(text) || figures(text).length > 0);
    return isNumeric ? (a, b) => compareFigures(figures(a), figures(b)) : byName;
  }

  function sorted(rows, column, direction) {
    const text = new Map(rows.map((row) => [row, textOf(row.cells[column])]));
    const present = rows.filter((row) => column === 0 || !isMissing(text.get(row)));
    const absent = rows.filter((row) => !present.includes(row));
    const compare = column === 0 ? byName : comparing([...text.values()]);
    const sign = direction === "descending" ? -1 : 1;
    present.sort((a, b) => sign * compare(text.get(a), text.get(b)));
    return [...present, ...absent];
  }

  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function setUpSorting(table) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    if (original.length < 2) return;
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      if (!button.textContent.trim()) button.setAttribute("aria-label", "Sort by this column");
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const direction = NEXT[heading.getAttribute("aria-sort")];
        headings.forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", direction);
        body.append(...(direction === "none" ? original : sorted(original, column, direction)));
      });
    });
  }

  addEventListener("DOMContentLoaded", () => {
    setUpTheme();
    document.querySelectorAll("main table").forEach(setUpSorting);
  });
})();
