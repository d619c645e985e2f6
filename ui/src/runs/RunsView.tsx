import { View } from "../app/View";

export default function RunsView() {
  return (
    <View name="runs" title="Runs">
      <p class="empty">Nothing here yet.</p>
    </View>
  );
}
