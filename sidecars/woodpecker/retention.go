package main

import (
	"context"
	"log"
	"time"
)

const retainEvery = 60 * time.Second

// retain removes what the policies of the channels keep no longer, by whole segments, which Woodpecker does not by
// itself. It does nothing once another sidecar has the log.
func (s *sidecar) retain(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(retainEvery):
		}
		for _, name := range s.names() {
			found, err := s.find(ctx, name)
			if kept, isDurable := found.(*durable); err == nil && isDurable && !s.isSuperseded() {
				if err := kept.retain(ctx, time.Now()); err != nil {
					log.Printf("retention of channel %s: %v", name, err)
				}
			}
		}
	}
}

func (c *durable) retain(ctx context.Context, now time.Time) error {
	kept := c.policyOf()
	if kept.RetentionS == nil && kept.RetentionBytes == nil {
		return nil
	}
	segments, err := c.history.segments(ctx)
	if err != nil {
		return err
	}
	end := keptFrom(segments, kept, now)
	if end < 0 {
		return nil
	}
	return c.truncate(ctx, place{end, 0}.id(c.base, firstOfSegment))
}

// keptFrom is the number of the segment before which the policy keeps nothing, -1 where it keeps all. A segment that is
// appended to stays.
func keptFrom(segments []segment, kept policy, now time.Time) int64 {
	total := int64(0)
	for _, each := range segments {
		total += each.size
	}
	end := int64(-1)
	for _, each := range segments {
		old := kept.RetentionS != nil && now.UnixMilli()-each.ended > int64(*kept.RetentionS*1000)
		large := kept.RetentionBytes != nil && total-each.size >= *kept.RetentionBytes
		if each.active || each.ended == 0 || !(old || large) {
			break
		}
		total -= each.size
		end = each.number + 1
	}
	return end
}
