// Asks containerd's CRI plugin to pull images, as the kubelet would: layers that are unpacked already are not fetched.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"
)

func main() {
	if len(os.Args) < 3 {
		fail(fmt.Errorf("usage: pull unix://SOCKET REFERENCE..."))
	}
	images, err := cri.NewRemoteImageService(os.Args[1], 10*time.Second, nil, nil)
	if err != nil {
		fail(err)
	}
	for _, reference := range os.Args[2:] {
		if _, err := images.PullImage(context.Background(), &runtimeapi.ImageSpec{Image: reference}, nil, nil); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
