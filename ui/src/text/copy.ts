// Copies a text to the clipboard, also where the page has no access to it (plain http of another machine).
import { announce } from "../app/announce";

const MARKED_MS = 2000;

/** `button`: shows for a moment that the text was copied. */
export async function copyText(text: string, button: HTMLElement): Promise<void> {
  const isCopied = await navigator.clipboard?.writeText(text).then(
    () => true,
    () => false,
  );
  if (!isCopied && !copyFromField(text, button)) {
    announce("The browser did not copy the text.");
    return;
  }
  announce("Copied.");
  button.classList.add("is-copied");
  setTimeout(() => button.classList.remove("is-copied"), MARKED_MS);
}

function copyFromField(text: string, button: HTMLElement): boolean {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  button.focus(); // the field had the focus
  return isCopied;
}
