// What screen readers are to say: whole sentences, one at a time, never tokens.
import { signal } from "@preact/signals";

export const announcement = signal("");

/** Says a sentence politely. A repeated sentence is said again. */
export function announce(sentence: string): void {
  announcement.value = announcement.peek() === sentence ? `${sentence}\u00a0` : sentence;
}
