// The node that is pointed at or focused: its facts, and its text if it belongs to this key's tenant.
import { Facts } from "../charts/Facts";
import { count } from "../charts/numbers";
import type { PrefixNode, PrefixTree } from "./prefixes";
import { usePeek, type Peek, type Texts } from "./texts";
import { factsOf } from "./words";

interface Props {
  readonly tree: PrefixTree;
  readonly texts: Texts;
  readonly node: PrefixNode | null;
  readonly nowS: number;
}

export function NodeDetails({ tree, texts, node, nowS }: Props) {
  const peek = usePeek(texts, node);
  if (node === null) {
    return (
      <p class="panel tree-details tree-hint">
        Point at a block, or move to one with the arrow keys, to read it.
      </p>
    );
  }
  const before = tree.pathTo(node).reduce((sum, one) => sum + one.numTokens, 0) - node.numTokens;
  return (
    <section class="panel details tree-details" aria-label="Node">
      <Facts facts={factsOf(node, before, nowS)} />
      <NodeText node={node} peek={peek} />
    </section>
  );
}

function NodeText({ node, peek }: { node: PrefixNode; peek: Peek | null }) {
  if (node.goneS !== null && peek === null) return <p class="tree-hint">It was evicted.</p>;
  if (peek === null) return <p class="tree-hint">…</p>;
  switch (peek.kind) {
    case "foreign":
      return <p class="tree-hint">It belongs to another tenant: its text is not shown.</p>;
    case "failed":
      return <p class="tree-hint">{peek.reason}</p>;
    case "text":
      return (
        <>
          <pre class="model-text" tabIndex={0} aria-label="Text of the node">
            {peek.text}
          </pre>
          {peek.numTokens < node.numTokens && (
            <p class="tree-hint">The first {count(peek.numTokens)} of its tokens.</p>
          )}
        </>
      );
  }
}
