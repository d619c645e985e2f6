// The texts of nodes, by `peek`: only those of this key's own tenant are given out.
import { AgentflowError, type Session } from "agentflow-client";
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { sentenceOf, session } from "../app/session";
import { startOf } from "../text/shorten";
import type { PrefixNode } from "./prefixes";

/** `foreign`: of another tenant. `gone`: no longer in the tree. */
export type Peek =
  | { readonly kind: "text"; readonly text: string; readonly numTokens: number }
  | { readonly kind: "foreign" }
  | { readonly kind: "failed"; readonly reason: string };

const DELAY_MS = 120;
const MAX_KEPT = 2000;

/** Texts that were asked for, by node and size: a node that was split has another text. */
export class Texts {
  readonly labels = new Map<number, string>();
  private readonly known = new Map<string, Peek>();
  private numClears = 0;

  find(node: PrefixNode): Peek | undefined {
    return this.known.get(this.keyOf(node));
  }

  /** Tells the node's text from others, also from that of a node with the same id in a tree that is gone. */
  keyOf({ id, numTokens }: PrefixNode): string {
    return `${this.numClears}/${id}/${numTokens}`;
  }

  async ask(from: Session, node: PrefixNode): Promise<Peek> {
    const key = this.keyOf(node);
    const found = this.known.get(key);
    if (found !== undefined) return found;
    let peek: Peek;
    try {
      const { text, numTokens } = await from.peek(node.id);
      peek = { kind: "text", text, numTokens };
    } catch (error) {
      const isForeign = error instanceof AgentflowError && error.code === "not_authorized";
      if (!isForeign) return { kind: "failed", reason: sentenceOf(error) };
      peek = { kind: "foreign" };
    }
    // The answer is about a tree that is gone: another node may have this id now.
    if (key !== this.keyOf(node)) return { kind: "failed", reason: "The tree has changed." };
    if (this.known.size >= MAX_KEPT) this.clear();
    this.known.set(this.keyOf(node), peek);
    if (peek.kind === "text") this.labels.set(node.id, startOf(peek.text, 300).replace(/\s+/g, " ").trim());
    else this.labels.delete(node.id);
    return peek;
  }

  clear(): void {
    this.numClears += 1;
    this.known.clear();
    this.labels.clear();
  }
}

/** The text of the node that is pointed at or focused, after a short while; null until then. */
export function usePeek(texts: Texts, node: PrefixNode | null): Peek | null {
  const found = useSignal<{ readonly key: string; readonly peek: Peek } | null>(null);
  const key = node === null ? "" : texts.keyOf(node);
  const from = session.value;
  useEffect(() => {
    const known = node === null ? undefined : texts.find(node);
    found.value = known === undefined ? null : { key, peek: known };
    if (from === null || node === null || known !== undefined || node.goneS !== null) return;
    let isLeft = false;
    const timer = setTimeout(() => {
      void texts.ask(from, node).then((peek) => {
        if (!isLeft) found.value = { key, peek };
      });
    }, DELAY_MS);
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  }, [key, from]);
  // Another node's text would stand here until the effect has run.
  return found.value?.key === key ? found.value.peek : null;
}

/** Asks for the texts of these nodes one after the other, and calls `changed` after each. */
export function useLabels(texts: Texts, wanted: readonly PrefixNode[], changed: () => void): void {
  const isAsking = useRef(false);
  const newest = useRef(wanted);
  newest.current = wanted;
  useEffect(() => {
    void next();
  });
  async function next(): Promise<void> {
    if (isAsking.current) return;
    isAsking.current = true;
    try {
      for (;;) {
        const from = session.peek();
        const node = newest.current.find((one) => one.goneS === null && texts.find(one) === undefined);
        if (from === null || node === undefined) return;
        const peek = await texts.ask(from, node);
        if (peek.kind === "failed") return; // the next look at the tree tries again
        changed();
      }
    } finally {
      isAsking.current = false;
    }
  }
}
