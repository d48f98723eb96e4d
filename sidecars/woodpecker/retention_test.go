package main

import (
	"testing"
	"time"
)

func TestRetentionKeepsWhatThePolicyAsks(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	ended := func(ago int64) int64 { return now.UnixMilli() - ago*1000 }
	segments := []segment{
		{number: 3, size: 100, ended: ended(500)},
		{number: 4, size: 100, ended: ended(300)},
		{number: 5, size: 100, ended: ended(100)},
		{number: 6, size: 0, active: true},
	}
	seconds := func(value float64) *float64 { return &value }
	bytes := func(value int64) *int64 { return &value }
	for _, each := range []struct {
		kept     policy
		expected int64
	}{
		{policy{}, -1},
		{policy{RetentionS: seconds(1000)}, -1},
		{policy{RetentionS: seconds(400)}, 4},
		{policy{RetentionS: seconds(0)}, 6},
		{policy{RetentionBytes: bytes(300)}, -1},
		{policy{RetentionBytes: bytes(200)}, 4},
		{policy{RetentionBytes: bytes(0)}, 6},
		{policy{RetentionS: seconds(400), RetentionBytes: bytes(100)}, 5},
	} {
		if found := keptFrom(segments, each.kept, now); found != each.expected {
			t.Errorf("%+v keeps from %d, not %d", each.kept, found, each.expected)
		}
	}
}
