// For the keyboard and for screen readers: whatever scrolls sideways can be focused, so that the arrow keys move it; each
// code block's buttons have a name of their own; and the menu of a narrow screen opens with Enter, as the theme's other
// labels do.
function mendPage() {
  for (const part of document.querySelectorAll(".md-typeset :is(pre > code, p:has(> img), .md-typeset__scrollwrap)")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
  const buttons = document.querySelectorAll(".md-code__nav");
  buttons.forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
  const menu = document.querySelector("label.md-header__button[for=__drawer]");
  menu.tabIndex = 0;
  const icon = menu.querySelector("svg");
  icon.setAttribute("role", "img");
  icon.setAttribute("aria-label", "Menu");
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.getElementById("__drawer").checked = false;
});
addEventListener("load", mendPage);
addEventListener("resize", mendPage);
