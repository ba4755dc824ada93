// For the keyboard and for screen readers: whatever scrolls sideways can be focused, so that the arrow keys move it, and
// each code block's buttons have a name of their own.
function mendPage() {
  for (const part of document.querySelectorAll(".md-typeset :is(pre > code, p:has(> img), .md-typeset__scrollwrap)")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
  const buttons = document.querySelectorAll(".md-code__nav");
  buttons.forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
}
addEventListener("load", mendPage);
addEventListener("resize", mendPage);
