package main

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/zilliztech/woodpecker/woodpecker/log"
)

// BenchmarkDirect appends through the library what the sidecar would, packs of 1 KiB records and as many on their way,
// without a socket: what the sidecar's own rate is compared with. TIDEWAL_WOODPECKER_CONFIG names the settings.
func BenchmarkDirect(b *testing.B) {
	path := os.Getenv("TIDEWAL_WOODPECKER_CONFIG")
	if path == "" {
		b.Skip("TIDEWAL_WOODPECKER_CONFIG names no settings")
	}
	settings, err := loaded([]string{path})
	if err != nil {
		b.Fatal(err)
	}
	client, _, err := connected(context.Background(), settings)
	if err != nil {
		b.Fatal(err)
	}
	name := fmt.Sprintf("direct-%d", time.Now().UnixNano())
	if err := client.CreateLog(context.Background(), name); err != nil {
		b.Fatal(err)
	}
	handle, err := client.OpenLog(context.Background(), name)
	if err != nil {
		b.Fatal(err)
	}
	writer, err := handle.OpenLogWriter(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	records := make([]record, packBytes/(1024+recordOverhead))
	for i := range records {
		records[i].payload = make([]byte, 1024)
	}
	flights := make(chan (<-chan *log.WriteResult), packsInFlight)
	done := make(chan error)
	b.SetBytes(int64(len(records)) * 1024)
	b.ResetTimer()
	go func() {
		var failed error
		for result := range flights {
			if outcome := <-result; outcome.Err != nil {
				failed = outcome.Err
			}
		}
		done <- failed
	}()
	for b.Loop() {
		flights <- writer.WriteAsync(context.Background(), &log.WriteMessage{Payload: encodePack(1, records)})
	}
	close(flights)
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N*len(records))/b.Elapsed().Seconds(), "records/s")
}
