// What screen readers are to say: whole sentences, never tokens. The newest ones stand in a live region.
import { signal } from "@preact/signals";

const KEPT = 6;
let count = 0;

export const announcements = signal<{ number: number; text: string }[]>([]);

/** Says a sentence politely, after those before it. */
export function announce(sentence: string): void {
  announcements.value = [...announcements.peek().slice(1 - KEPT), { number: ++count, text: sentence }];
}
